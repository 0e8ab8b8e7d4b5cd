// What the two layouts differ in, for kernels that are written once for both.
#pragma once

#include "walk.cuh"

namespace bagua_syncbn::cuda {

template <int W>
__device__ __forceinline__ Slot<W> next_slot(PlanarWalk<W>& walk) {
  return walk.next();
}
template <int W>
__device__ __forceinline__ Slot<W> next_slot(InterleavedWalk<W>& walk) {
  const int64_t offset = walk.next();
  return {offset, 0, offset >= 0 ? W : 0};
}

template <int W>
__device__ __forceinline__ bool whole(const PlanarWalk<W>& walk) {
  return walk.whole();
}
template <int W>
__device__ __forceinline__ bool whole(const InterleavedWalk<W>&) {
  return true;
}

// Slots that a thread loads at once, K of each tensor, of channels of which it has `kLanes`.
template <typename Plan, int W, int K>
struct Batch {
  static constexpr bool kPlanar = std::is_same_v<Plan, Planar>;
  static constexpr int kLanes = kPlanar ? 1 : W;

  std::conditional_t<kPlanar, PlanarWalk<W>, InterleavedWalk<W>> walk;
  Slot<W> slots[K];
  bool any;

  __device__ __forceinline__ Batch(const Plan& plan, bool reversed) : walk(plan, reversed) {}
  __device__ __forceinline__ void next() {
    any = !walk.done();
#pragma unroll
    for (int u = 0; u < K; ++u) slots[u] = next_slot(walk);
  }
  // Whether there is no slot from slot u on, which is known where they all begin in the same column.
  __device__ __forceinline__ bool ends_before(int u) const { return !kPlanar && slots[u].offset < 0; }
  template <typename T>
  __device__ __forceinline__ void store(T* y, int u, const Pack<T, W>& pack) const {
    if constexpr (kPlanar) {
      store_slot(y, slots[u], pack);
    } else {
      store_pack(y + slots[u].offset, pack);
    }
  }
};

}  // namespace bagua_syncbn::cuda
