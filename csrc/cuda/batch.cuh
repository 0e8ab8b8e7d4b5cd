// Batches: the slots that a thread loads before it uses the first value. Kernels are written once for both layouts,
// with and without a mask.
#pragma once

#include "walk.cuh"

namespace bagua_syncbn::cuda {

enum class Op { kStats, kElemt, kBackwardReduce, kBackwardElemt };

// Compile-time constants of a kernel that reads a whole tensor in layout Plan_ (split.h): kWidth_ values of type T_ at
// a time, with a mask, or with an activation and a residual.
template <Op kOp, typename T_, int kWidth_, typename Plan_, bool kMasked_, bool kActivates_>
struct Traits {
  using T = T_;
  using A = Accumulate<T>;
  using Plan = Plan_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kActivates = kActivates_;
  static constexpr bool kPlanar = std::is_same_v<Plan, Planar>;
  static constexpr bool kReduces = kOp == Op::kStats || kOp == Op::kBackwardReduce;

  // Channels per thread, and maximum channels per block.
  static constexpr int kLanes = kPlanar ? 1 : kWidth;
  static constexpr int kTile = kPlanar ? 1 : kWidth == 1 ? kWarp : kLineBytes / kVectorBytes * kWidth;

  // Slots per batch. Twice as many for scalars, half as many for two input tensors.
  static constexpr bool kOneInput = kOp == Op::kStats || (kOp == Op::kElemt && !kActivates);
  static constexpr int kSlots = (kWidth == 1 ? 2 : 1) * kBatch / (kOneInput ? 1 : 2);
  // With activations, the loop over slots is not unrolled; otherwise, one kernel spills registers.
  static constexpr int kUnroll = kActivates ? 1 : kSlots;

  // The compiler limits registers so that this many blocks fit a multiprocessor; 0: no limit. With one more block, the
  // kernel spills registers or delays a load on at least one card.
  static constexpr int resident() {
    constexpr int size = sizeof(T);
    if (kOp == Op::kStats) return kMasked ? 2 : kPlanar || size == 4 ? 4 : size == 8 ? 3 : 2;
    if (kOp == Op::kElemt) return (size == 8 ? 3 : 4) - kActivates;
    if (kActivates) return size == 4 ? 3 : 2;
    if (kOp == Op::kBackwardElemt) return kMasked && kWidth == 8 ? 2 : 3;
    return kPlanar ? (kWidth == 1 ? 4 : 0) : size == 8 ? 2 : 3;
  }
};

// Planar: returns a bit for each valid value of `slot`, which belongs to `channel` of `sample`.
template <int W>
__device__ __forceinline__ unsigned valid_bits(const uint8_t* mask, const Planar& plan, int64_t channel, int64_t sample,
                                               const Slot<W, true>& slot) {
  if (slot.empty()) return 0;
  const uint8_t* valid = mask + slot.offset - (sample * (plan.channels - 1) + channel) * plan.inner;
  unsigned bits = 0;
  if (slot.full() && reinterpret_cast<uintptr_t>(valid) % W == 0) {
    uint64_t bytes = 0;
    memcpy(&bytes, __builtin_assume_aligned(valid, W), W);
#pragma unroll
    for (int j = 0; j < W; ++j) bits |= static_cast<unsigned>((bytes >> 8 * j & 255) != 0) << j;
    return bits;
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (slot.holds(j)) bits |= static_cast<unsigned>(valid[j] != 0) << j;
  }
  return bits;
}

// Removes and returns the first item. Runtime indexing would put the array into local memory.
template <typename V, int K>
__device__ __forceinline__ V take(V (&items)[K]) {
  const V first = items[0];
#pragma unroll
  for (int k = 1; k < K; ++k) items[k - 1] = items[k];
  return first;
}

// A batch of slots. All channels share a mask, so its bytes are mostly cached: they are loaded after the values.
template <typename Traits>
class Batch {
 public:
  static constexpr int kSlots = Traits::kSlots, kWidth = Traits::kWidth;
  using Walk = std::conditional_t<Traits::kPlanar, PlanarWalk<Traits::kWidth>, InterleavedWalk<Traits::kWidth>>;

  Walk walk;
  Slot<kWidth, Traits::kPlanar> slots[kSlots];
  bool any;  // whether there is a slot

  __device__ __forceinline__ Batch(const typename Traits::Plan& plan, bool reversed, const uint8_t* mask = nullptr)
      : walk(plan, reversed), plan_(plan), mask_(mask) {}

  __device__ __forceinline__ void next() {
    any = !walk.done();
#pragma unroll
    for (int u = 0; u < kSlots; ++u) {
      if constexpr (Traits::kMasked) places_[u] = walk.place();
      slots[u] = walk.next();
    }
  }
  // Determines the valid values. Call it after the loads.
  __device__ __forceinline__ void read_mask() {
    valid_ = 0;
#pragma unroll
    for (int u = 0; u < kSlots; ++u) valid_ |= valid(u) << (u * kWidth);
  }

  // True if value w of slot u is valid.
  __device__ __forceinline__ bool counts(int w, int u) const { return (valid_ >> (u * kWidth + w) & 1) != 0; }
  // Number of valid values per channel; whether all are valid.
  __device__ __forceinline__ int count() const { return __popc(valid_) / Traits::kLanes; }
  __device__ __forceinline__ bool full() const { return valid_ == ~0u >> (32 - kSlots * kWidth); }

  // Removes the first slot.
  __device__ __forceinline__ void pop() {
    take(slots);
    valid_ >>= kWidth;
  }

 private:
  __device__ __forceinline__ unsigned valid(int u) const {
    const auto& slot = slots[u];
    if constexpr (!Traits::kMasked) return slot.mask();
    if constexpr (Traits::kPlanar) return valid_bits(mask_, plan_, walk.channel, places_[u], slot);
    return !slot.empty() && mask_[places_[u]] != 0 ? slot.mask() : 0;
  }

  const typename Traits::Plan& plan_;
  const uint8_t* const mask_;
  int64_t places_[kSlots];  // samples or rows
  unsigned valid_;          // kWidth bits for each slot
};

// Loaded values of a batch in one tensor.
template <typename Traits>
struct Loaded {
  using T = typename Traits::T;
  static constexpr int W = Traits::kWidth, kSlots = Traits::kSlots;

  Bits<T, W> bits[kSlots];

  __device__ __forceinline__ void load(const T* tensor, const Batch<Traits>& batch) {
#pragma unroll
    for (int u = 0; u < kSlots; ++u) {
      // Element-wise kernels are the last readers.
      bits[u] = load_slot<!Traits::kReduces, T>(tensor, batch.slots[u], batch.walk.whole());
    }
  }
  __device__ __forceinline__ Pack<T, W> slot(int u) const { return pack_of<T, W>(bits[u]); }
  // Replaces each invalid value with its channel's value in `others`.
  __device__ __forceinline__ void replace(const Batch<Traits>& batch,
                                          const typename Traits::A (&others)[Traits::kLanes]) {
#pragma unroll
    for (int u = 0; u < kSlots; ++u) {
      Pack<T, W> pack = slot(u);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (!batch.counts(w, u)) pack.values[w] = static_cast<T>(others[w % Traits::kLanes]);
      }
      memcpy(&bits[u], &pack, sizeof(pack));
    }
  }
  // Removes and returns the first slot.
  __device__ __forceinline__ Pack<T, W> pop() {
    const Pack<T, W> first = slot(0);
    take(bits);
    return first;
  }
};

}  // namespace bagua_syncbn::cuda
