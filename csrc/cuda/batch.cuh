// Slots that a thread loads at once, and which of their values count: for kernels that are written once for both
// layouts, with a mask and without.
#pragma once

#include "walk.cuh"

namespace bagua_syncbn::cuda {

// Planar: a bit for each value that `slot` of `sample` and `channel` holds and that counts.
template <int W>
__device__ __forceinline__ unsigned counting(const Mask& mask, const Planar& plan, int64_t channel, int64_t sample,
                                             const Slot<W>& slot) {
  if (slot.last <= 0) return 0;
  // In its row; before it, where the slot is cut short.
  const int64_t begin = slot.offset - (sample * plan.channels + channel) * plan.inner;
  unsigned bits = 0;
  if (mask.positions == nullptr) {
    const int64_t kept = mask.lengths[sample];
    int64_t place = begin + slot.first;
    if (mask.length != plan.inner) place %= mask.length;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (!slot.holds(j)) continue;
      if (place < kept) bits |= 1u << j;
      if (++place == mask.length) place = 0;
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

// Interleaved: whether `row`, in which a thread has `slot`, counts.
__device__ __forceinline__ unsigned counting(const Mask& mask, const Interleaved&, int64_t, int64_t row,
                                             const RowSlot& slot) {
  return slot.offset >= 0 &&
         (mask.positions != nullptr ? mask.positions[row] != 0 : row % mask.length < mask.lengths[row / mask.inner]);
}

// The first of `items`; the rest moves up. With an index that is known only when a kernel runs, an array would have to
// lie in local memory.
template <typename V, int K>
__device__ __forceinline__ V take(V (&items)[K]) {
  const V first = items[0];
#pragma unroll
  for (int k = 1; k < K; ++k) items[k - 1] = items[k];
  return first;
}

// K slots of each tensor; a thread has `kLanes` channels. All channels share a mask, so its bytes are mostly cached;
// they are read after the loads of values have begun.
template <typename Plan, int W, int K, bool kMasked = false>
class Batch {
 public:
  static constexpr bool kPlanar = std::is_same_v<Plan, Planar>;
  static constexpr int kLanes = kPlanar ? 1 : W;
  static constexpr int kBits = kPlanar ? W : 1;  // of a slot
  using Walk = std::conditional_t<kPlanar, PlanarWalk<W>, InterleavedWalk<W>>;
  using AnySlot = std::conditional_t<kPlanar, Slot<W>, RowSlot>;

  struct Taken {
    AnySlot slot;
    unsigned valid;

    // Whether value w counts. An interleaved slot that is not there is all zeros, which add nothing to a sum of
    // gradients.
    __device__ __forceinline__ bool counts(int w) const {
      if (!kMasked && !kPlanar) return true;
      return (valid >> (kBits == 1 ? 0 : w) & 1) != 0;
    }
  };

  Walk walk;
  AnySlot slots[K];
  bool any;

  __device__ __forceinline__ Batch(const Plan& plan, bool reversed, const Mask& mask = {})
      : walk(plan, reversed), plan_(plan), mask_(mask) {}

  __device__ __forceinline__ void next() {
    any = !walk.done();
#pragma unroll
    for (int u = 0; u < K; ++u) {
      if constexpr (kMasked) places_[u] = walk.place();
      slots[u] = walk.next();
    }
  }
  // Reads which values count: after the loads.
  __device__ __forceinline__ void read_mask() {
    valid_ = 0;
#pragma unroll
    for (int u = 0; u < K; ++u) valid_ |= valid(u) << (u * kBits);
  }

  // Whether value w of slot u counts.
  __device__ __forceinline__ bool counts(int w, int u) const {
    return (valid_ >> (u * kBits + (kBits == 1 ? 0 : w)) & 1) != 0;
  }
  // So many of the values of a channel count; whether all do.
  __device__ __forceinline__ int found() const { return __popc(valid_); }
  __device__ __forceinline__ bool full() const { return valid_ == ~0u >> (32 - K * kBits); }

  // The first slot, which is gone then.
  __device__ __forceinline__ Taken pop() {
    const Taken first{take(slots), valid_};
    valid_ >>= kBits;
    return first;
  }

 private:
  __device__ __forceinline__ unsigned valid(int u) const {
    if constexpr (kMasked) return counting(mask_, plan_, walk.channel, places_[u], slots[u]);
    return slots[u].mask();
  }

  const Plan& plan_;
  const Mask mask_;
  int64_t places_[K];  // samples or rows
  unsigned valid_;     // a bit for each value, or row, that counts
};

// A batch's values of one tensor, as they were loaded.
template <typename T, int W, int K, Read kRead>
struct Loaded {
  Bits<T, W> bits[K];

  template <typename Slots>
  __device__ __forceinline__ void load(const T* tensor, const Slots& batch) {
#pragma unroll
    for (int u = 0; u < K; ++u) bits[u] = load_slot<W, kRead>(tensor, batch.slots[u], batch.walk.whole());
  }
  __device__ __forceinline__ Pack<T, W> slot(int u) const { return pack_of<T, W>(bits[u]); }
  // Sets values that do not count to those of their channels in `others`.
  template <typename Slots, typename A, int kLanes>
  __device__ __forceinline__ void replace(const Slots& batch, const A (&others)[kLanes]) {
#pragma unroll
    for (int u = 0; u < K; ++u) {
      Pack<T, W> pack = slot(u);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (!batch.counts(w, u)) pack.values[w] = narrow<T>(others[w % kLanes]);
      }
      memcpy(&bits[u], &pack, sizeof(pack));
    }
  }
  // The first slot, which is gone then.
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
