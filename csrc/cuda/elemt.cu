// batch_norm_elemt: y = (x - mean) * invstd * weight + bias.
//
// Planar: a block takes a part of a channel, so that the factors are read once by each thread. Interleaved: a block
// takes a range of rows of a tile of channels, a thread the factors of its W channels, by way of shared memory. See
// walk.cuh for both. Blocks go over the tensor from its end: the statistics went over it from its beginning, and what
// they read last is still cached. The mean is subtracted first: folded into the bias it would cancel where it is large
// beside the deviation.

#include "walk.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename A>
struct Factors {
  A mean, scale, shift;

  Factors() = default;
  __device__ __forceinline__ Factors(const Affine& affine, int64_t c)
      : mean(read_channel<A>(affine.mean, c)),
        scale(read_channel<A>(affine.invstd, c) * read_channel<A>(affine.weight, c, A(1))),
        shift(read_channel<A>(affine.bias, c, A(0))) {}
  __device__ __forceinline__ A normalize(A value) const { return (value - mean) * scale + shift; }
};

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_elemt(const T* __restrict__ x, T* __restrict__ y, Planar plan, int misaligned, Affine affine) {
  PlanarWalk<W> walk(plan, misaligned, true);
  const Factors<A> factors(affine, walk.channel);
  while (!walk.done()) {
    Slot<W> slots[kSlots<W>];
    Pack<T, W> packs[kSlots<W>];
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
      slots[u] = walk.next();
      packs[u] = load_slot(x, slots[u]);
    }
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
#pragma unroll
      for (int j = 0; j < W; ++j) packs[u].values[j] = narrow<T>(factors.normalize(widen(packs[u].values[j])));
      store_slot(y, slots[u], packs[u]);
    }
  }
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    interleaved_elemt(const T* __restrict__ x, T* __restrict__ y, Interleaved plan, Affine affine) {
  InterleavedWalk<W> walk(plan, true);
  Factors<A> factors[W];
  share_factors(factors, walk, plan.channels, [&](int64_t c) { return Factors<A>(affine, c); });
  while (!walk.done()) {
    int64_t offsets[kSlots<W>];
    Pack<T, W> packs[kSlots<W>];
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
      offsets[u] = walk.next();
      if (offsets[u] >= 0) packs[u] = load_pack<W>(x + offsets[u]);
    }
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
      if (offsets[u] < 0) break;
#pragma unroll
      for (int w = 0; w < W; ++w) packs[u].values[w] = narrow<T>(factors[w].normalize(widen(packs[u].values[w])));
      store_pack(y + offsets[u], packs[u]);
    }
  }
}

template <typename T, int W>
const char* launch_elemt(const T* x, T* y, const Geometry& g, const Affine& affine, Stream stream) {
  if (g.interleaved) {
    const Interleaved plan = split_interleaved(g, W, sizeof(T), kElementwise);
    return launch(interleaved_elemt<T, W>, plan.blocks(), block_of(plan), stream, x, y, plan, affine);
  }
  const int misaligned = misalignment<T, W>(x);
  const Planar plan = split_planar(g, W, misaligned == 0 && g.inner % W == 0, kElementwise);
  if (!fits(plan, W)) return kTooLarge;
  return launch(planar_elemt<T, W>, plan.blocks(), block_of(plan), stream, x, y, plan, misaligned, affine);
}

}  // namespace

const char* elemt(const void* x, void* y, DType dtype, const Geometry& g, const Affine& affine, Stream stream) {
  return dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool vectors = takes_vectors(g, sizeof(T), {x, y});
    return (vectors ? launch_elemt<T, kVector<T>> : launch_elemt<T, 1>)(static_cast<const T*>(x), static_cast<T*>(y), g,
                                                                        affine, stream);
  });
}

}  // namespace bagua_syncbn::cuda
