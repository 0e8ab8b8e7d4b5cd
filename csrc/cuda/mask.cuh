// Which of the values that a thread has loaded count. All channels share a mask, so its bytes are mostly cached; they
// are read after the values are under way.
#pragma once

#include "../mask.h"
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

// Planar: the next K slots of a walk, and the samples that they are of.
template <int K, int W>
struct MaskedSlots {
  Slot<W> slots[K];
  int64_t samples[K];

  __device__ __forceinline__ void next(PlanarWalk<W>& walk, int64_t samples_end) {
#pragma unroll
    for (int u = 0; u < K; ++u) {
      samples[u] = samples_end - walk.left();
      slots[u] = walk.next();
    }
  }
  __device__ __forceinline__ unsigned bits(const Mask& mask, const Planar& plan, int64_t channel) const {
    unsigned valid = 0;
#pragma unroll
    for (int u = 0; u < K; ++u) valid |= counting(mask, plan, channel, samples[u], slots[u]) << (u * W);
    return valid;
  }
};

// Where the samples of the part of this block end.
__device__ __forceinline__ int64_t samples_end(const Planar& plan, bool reversed) {
  return plan.samples_of_part.begin_of(Place(reversed).z + 1);
}

// Interleaved: the next K rows of a walk.
template <int K, int W>
struct MaskedRows {
  int64_t offsets[K];
  int64_t rows[K];

  __device__ __forceinline__ void next(InterleavedWalk<W>& walk) {
#pragma unroll
    for (int u = 0; u < K; ++u) {
      rows[u] = walk.row();
      offsets[u] = walk.next();
    }
  }
  // A bit for each that there is and that counts.
  __device__ __forceinline__ unsigned bits(const Mask& mask) const {
    unsigned valid = 0;
#pragma unroll
    for (int u = 0; u < K; ++u) {
      if (offsets[u] < 0) continue;
      const bool counts = mask.positions != nullptr ? mask.positions[rows[u]] != 0
                                                    : rows[u] % mask.length < mask.lengths[rows[u] / mask.inner];
      valid |= static_cast<unsigned>(counts) << u;
    }
    return valid;
  }
};

}  // namespace bagua_syncbn::cuda
