// batch_norm_masked_elemt: as elemt.cu where a position counts, else 0, whatever x is there.

#include "factors.cuh"
#include "mask.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_masked_elemt(Planar plan, const T* __restrict__ x, T* __restrict__ y, Mask mask, ElemtArguments arguments) {
  PlanarWalk<W> walk(plan, true);
  const int64_t end = samples_end(plan, true);
  MaskedSlots<kSlots<W>, W> at;
  Pack<T, W> packs[kSlots<W>];
  const auto load = [&] {
    at.next(walk, end);
    load_slots(walk, x, at.slots, packs);
    return at.bits(mask, plan, walk.channel);
  };
  bool more = !walk.done();
  unsigned valid = load();
  const auto factors = share_factors<NormalizeFactors<A>>([&] { return NormalizeFactors<A>(arguments, walk.channel); });
  while (more) {
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const A value = factors.normalize(widen(packs[u].values[j]));
        packs[u].values[j] = narrow<T>((valid >> (u * W + j) & 1) != 0 ? value : A(0));
      }
      store_slot(y, at.slots[u], packs[u]);
    }
    more = !walk.done();
    valid = load();
  }
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 3)
    interleaved_masked_elemt(Interleaved plan, const T* __restrict__ x, T* __restrict__ y, Mask mask,
                             ElemtArguments arguments) {
  InterleavedWalk<W> walk(plan, true);
  MaskedRows<kSlots<W>, W> at;
  Pack<T, W> packs[kSlots<W>];
  const auto load = [&] {
    at.next(walk);
    load_offsets(x, at.offsets, packs);
    return at.bits(mask);
  };
  bool more = !walk.done();
  unsigned valid = load();
  NormalizeFactors<A> factors[W];
  share_factors(factors, walk, [&](int64_t c) { return NormalizeFactors<A>(arguments, c); });
  while (more) {
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
      if (at.offsets[u] < 0) break;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A value = factors[w].normalize(widen(packs[u].values[w]));
        packs[u].values[w] = narrow<T>((valid >> u & 1) != 0 ? value : A(0));
      }
      store_pack(y + at.offsets[u], packs[u]);
    }
    more = !walk.done();
    valid = load();
  }
}

template <typename T, int W>
struct MaskedElemt {
  static constexpr auto planar = planar_masked_elemt<T, W>;
  static constexpr auto interleaved = interleaved_masked_elemt<T, W>;
};

}  // namespace

const char* masked_elemt(const void* x, void* y, DType dtype, const Geometry& g, const Mask& mask,
                         const ElemtArguments& arguments, Stream stream) {
  return dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    return launch_elementwise<MaskedElemt, T>(g, {x, y}, stream, static_cast<const T*>(x), static_cast<T*>(y), mask,
                                              arguments);
  });
}

}  // namespace bagua_syncbn::cuda
