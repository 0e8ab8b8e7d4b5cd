// Batches: the slots that a thread loads before it uses the first value. Kernels are written once for both layouts,
// with and without a mask.
#pragma once

#include "traits.cuh"
#include "walk.cuh"

namespace bagua_syncbn::cuda {

// The unsigned integer of kBytes bytes.
template <int kBytes>
using Unsigned =
    std::conditional_t<kBytes == 8, uint64_t,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>;

// Planar: a bit for each valid value of `slot`, which is in `sample` and `channel`.
template <int W>
__device__ __forceinline__ unsigned valid_bits(const Mask& mask, const Planar& plan, int64_t channel, int64_t sample,
                                               const Slot<W>& slot) {
  if (slot.last <= 0) return 0;
  const int64_t begin = slot.offset - (sample * plan.channels + channel) * plan.inner;  // negative before the row
  unsigned bits = 0;
  if (mask.positions == nullptr) {
    const int64_t length = mask.lengths[sample];
    int64_t position = begin + slot.first;
    if (mask.length != plan.inner) position %= mask.length;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (!slot.holds(j)) continue;
      if (position < length) bits |= 1u << j;
      if (++position == mask.length) position = 0;
    }
    return bits;
  }
  const uint8_t* valid = mask.positions + sample * plan.inner + begin;
  if constexpr (W > 1) {
    if (slot.full() && reinterpret_cast<uintptr_t>(valid) % W == 0) {
      const auto word = *reinterpret_cast<const Unsigned<W>*>(valid);
#pragma unroll
      for (int j = 0; j < W; ++j) bits |= static_cast<unsigned>(word >> 8 * j & 1) << j;
      return bits;
    }
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (slot.holds(j)) bits |= static_cast<unsigned>(valid[j]) << j;
  }
  return bits;
}

// Interleaved: 1 if `row`, which `slot` is in, is valid.
__device__ __forceinline__ unsigned valid_bits(const Mask& mask, const Interleaved&, int64_t, int64_t row,
                                               const RowSlot& slot) {
  return slot.offset >= 0 &&
         (mask.positions != nullptr ? mask.positions[row] != 0 : row % mask.length < mask.lengths[row / mask.inner]);
}

// Returns the first of `items` and moves the others up. An array with an index that is not a compile-time constant
// would be in local memory.
template <typename V, int K>
__device__ __forceinline__ V take(V (&items)[K]) {
  const V first = items[0];
#pragma unroll
  for (int k = 1; k < K; ++k) items[k - 1] = items[k];
  return first;
}

// A batch of slots. All channels share a mask, so its bytes are mostly cached: they are read after the loads of values
// were issued.
template <typename Traits>
class Batch {
 public:
  static constexpr int kSlots = Traits::kSlots;
  static constexpr int kBits = Traits::kPlanar ? Traits::kWidth : 1;  // per slot
  using Walk = std::conditional_t<Traits::kPlanar, PlanarWalk<Traits::kWidth>, InterleavedWalk<Traits::kWidth>>;

  struct Taken {
    typename Walk::Slot slot;
    unsigned valid;

    // True if value w is valid. An empty interleaved slot is all zeros, which add nothing to a sum of gradients.
    __device__ __forceinline__ bool counts(int w) const {
      if (!Traits::kMasked && !Traits::kPlanar) return true;
      return (valid >> (kBits == 1 ? 0 : w) & 1) != 0;
    }
  };

  Walk walk;
  typename Walk::Slot slots[kSlots];
  bool any;  // whether there is a slot

  __device__ __forceinline__ Batch(const typename Traits::Plan& plan, bool reversed, const Mask& mask = {})
      : walk(plan, reversed), plan_(plan), mask_(mask) {}

  __device__ __forceinline__ void next() {
    any = !walk.done();
#pragma unroll
    for (int u = 0; u < kSlots; ++u) {
      if constexpr (Traits::kMasked) places_[u] = walk.place();
      slots[u] = walk.next();
    }
  }
  // Determines the valid values. To be called after the loads.
  __device__ __forceinline__ void read_mask() {
    valid_ = 0;
#pragma unroll
    for (int u = 0; u < kSlots; ++u) valid_ |= valid(u) << (u * kBits);
  }

  // True if value w of slot u is valid.
  __device__ __forceinline__ bool counts(int w, int u) const {
    return (valid_ >> (u * kBits + (kBits == 1 ? 0 : w)) & 1) != 0;
  }
  // Number of valid values per channel; whether all are valid.
  __device__ __forceinline__ int count() const { return __popc(valid_); }
  __device__ __forceinline__ bool full() const { return valid_ == ~0u >> (32 - kSlots * kBits); }

  // Removes the first slot.
  __device__ __forceinline__ Taken pop() {
    const Taken first{take(slots), valid_};
    valid_ >>= kBits;
    return first;
  }

 private:
  __device__ __forceinline__ unsigned valid(int u) const {
    if constexpr (Traits::kMasked) return valid_bits(mask_, plan_, walk.channel, places_[u], slots[u]);
    return slots[u].mask();
  }

  const typename Traits::Plan& plan_;
  const Mask mask_;
  int64_t places_[kSlots];  // samples or rows
  unsigned valid_;          // kBits for each slot
};

// The values of a batch in one tensor, as they were loaded.
template <typename Traits>
struct Loaded {
  using T = typename Traits::T;
  static constexpr int W = Traits::kWidth, kSlots = Traits::kSlots;

  Bits<T, W> bits[kSlots];

  __device__ __forceinline__ void load(const T* tensor, const Batch<Traits>& batch) {
#pragma unroll
    for (int u = 0; u < kSlots; ++u) bits[u] = load_slot<W, Traits::kRead>(tensor, batch.slots[u], batch.walk.whole());
  }
  __device__ __forceinline__ Pack<T, W> slot(int u) const { return pack_of<T, W>(bits[u]); }
  // Replaces invalid values by those of their channels in `others`.
  __device__ __forceinline__ void replace(const Batch<Traits>& batch,
                                          const typename Traits::A (&others)[Traits::kLanes]) {
#pragma unroll
    for (int u = 0; u < kSlots; ++u) {
      Pack<T, W> pack = slot(u);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (!batch.counts(w, u)) pack.values[w] = narrow<T>(others[w % Traits::kLanes]);
      }
      memcpy(&bits[u], &pack, sizeof(pack));
    }
  }
  // Removes the first slot.
  __device__ __forceinline__ Pack<T, W> pop() {
    const Pack<T, W> first = slot(0);
    take(bits);
    return first;
  }
};

template <typename T, typename A, int W>
__device__ __forceinline__ Pack<T, W> narrow_all(const A (&values)[W]) {
  Pack<T, W> pack;
#pragma unroll
  for (int w = 0; w < W; ++w) pack.values[w] = narrow<T>(values[w]);
  return pack;
}

}  // namespace bagua_syncbn::cuda
