// Which of the values that a thread has loaded count. All channels share a mask, so its bytes are mostly cached; they
// are read after the values are under way.
#pragma once

#include "../mask.h"
#include "batch.cuh"

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
      const auto word = *reinterpret_cast<const typename Unsigned<W>::type*>(valid);
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

// Interleaved: whether a row counts.
__device__ __forceinline__ bool counting(const Mask& mask, int64_t row) {
  return mask.positions != nullptr ? mask.positions[row] != 0 : row % mask.length < mask.lengths[row / mask.inner];
}

// A batch, and which of its values count.
template <typename Plan, int W, int K>
class MaskedBatch : public Batch<Plan, W, K> {
 public:
  using Batch<Plan, W, K>::kPlanar, Batch<Plan, W, K>::walk, Batch<Plan, W, K>::slots, Batch<Plan, W, K>::any;

  __device__ __forceinline__ MaskedBatch(const Plan& plan, const Mask& mask, bool reversed)
      : Batch<Plan, W, K>(plan, reversed), plan_(plan), mask_(mask) {
    if constexpr (kPlanar) samples_end_ = plan.samples_of_part.begin_of(Place(reversed).z + 1);
  }

  // The next slots, loaded from one tensor, or from two.
  template <typename T>
  __device__ __forceinline__ void load(const T* x, Pack<T, W> (&packs)[K]) {
    next();
    load_slots(walk, x, slots, packs);
    read_mask();
  }
  template <typename T>
  __device__ __forceinline__ void load(const T* x, const T* y, Pack<T, W> (&x_packs)[K], Pack<T, W> (&y_packs)[K]) {
    next();
    load_pairs(walk, x, y, slots, x_packs, y_packs);
    read_mask();
  }

  // Whether value w of slot u counts.
  __device__ __forceinline__ bool counts(int u, int w) const { return (valid_ >> (kPlanar ? u * W + w : u) & 1) != 0; }
  // Of a channel, so many values of this batch do.
  __device__ __forceinline__ int found() const { return __popc(valid_); }

 private:
  __device__ __forceinline__ void next() {
    any = !walk.done();
#pragma unroll
    for (int u = 0; u < K; ++u) {
      if constexpr (kPlanar) {
        places_[u] = samples_end_ - walk.left();
      } else {
        places_[u] = walk.row();
      }
      slots[u] = next_slot(walk);
    }
  }
  __device__ __forceinline__ void read_mask() {
    valid_ = 0;
#pragma unroll
    for (int u = 0; u < K; ++u) {
      if constexpr (kPlanar) {
        valid_ |= counting(mask_, plan_, walk.channel, places_[u], slots[u]) << (u * W);
      } else if (slots[u].offset >= 0) {
        valid_ |= static_cast<unsigned>(counting(mask_, places_[u])) << u;
      }
    }
  }

  const Plan& plan_;
  const Mask& mask_;
  int64_t samples_end_;  // planar: of the part
  int64_t places_[K];    // samples or rows
  unsigned valid_;       // a bit for each value, or row, that counts
};

}  // namespace bagua_syncbn::cuda
