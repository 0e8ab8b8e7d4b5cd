// batch_norm_elemt: y = (x - mean) * invstd * weight + bias.
//
// Planar: a block takes a part of a channel, so that the factors are read once by each thread. Interleaved: a block
// takes a range of rows of a tile of channels, a thread the factors of its W channels, by way of shared memory. See
// walk.cuh for both. Blocks go over the tensor from its end: the statistics went over it from its beginning, and what
// they read last is still cached. The mean is subtracted first: folded into the bias it would cancel where it is large
// beside the deviation.

#include "factors.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_elemt(Planar plan, const T* __restrict__ x, T* __restrict__ y, ElemtArguments arguments) {
  PlanarWalk<W> walk(plan, true);
  Slot<W> slots[kSlots<W>];
  Pack<T, W> packs[kSlots<W>];
  bool more = !walk.done();
  next_slots(walk, slots);
  load_slots(walk, x, slots, packs);
  const auto factors =  // waited for together with the first batch
      share_factors<NormalizeFactors<A>>([&] { return NormalizeFactors<A>(arguments, walk.channel); });
  while (more) {
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
#pragma unroll
      for (int j = 0; j < W; ++j) packs[u].values[j] = narrow<T>(factors.normalize(widen(packs[u].values[j])));
      store_slot(y, slots[u], packs[u]);
    }
    more = !walk.done();
    next_slots(walk, slots);
    load_slots(walk, x, slots, packs);
  }
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    interleaved_elemt(Interleaved plan, const T* __restrict__ x, T* __restrict__ y, ElemtArguments arguments) {
  InterleavedWalk<W> walk(plan, true);
  int64_t offsets[kSlots<W>];
  Pack<T, W> packs[kSlots<W>];
  bool more = !walk.done();
  next_offsets(walk, offsets);
  load_offsets(x, offsets, packs);
  NormalizeFactors<A> factors[W];  // waited for together with the first batch
  share_factors(factors, walk, [&](int64_t c) { return NormalizeFactors<A>(arguments, c); });
  while (more) {
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
      if (offsets[u] < 0) break;
#pragma unroll
      for (int w = 0; w < W; ++w) packs[u].values[w] = narrow<T>(factors[w].normalize(widen(packs[u].values[w])));
      store_pack(y + offsets[u], packs[u]);
    }
    more = !walk.done();
    next_offsets(walk, offsets);
    load_offsets(x, offsets, packs);
  }
}

template <typename T, int W>
struct Elemt {
  static constexpr auto planar = planar_elemt<T, W>;
  static constexpr auto interleaved = interleaved_elemt<T, W>;
};

}  // namespace

const char* elemt(const void* x, void* y, DType dtype, const Geometry& g, const ElemtArguments& arguments,
                  Stream stream) {
  return launch_elementwise<Elemt>(dtype, g, {x, y}, stream, In{x}, Out{y}, arguments);
}

}  // namespace bagua_syncbn::cuda
