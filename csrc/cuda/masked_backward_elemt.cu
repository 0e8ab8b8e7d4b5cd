// batch_norm_masked_backward_elemt: as backward_elemt.cu where a position counts, else dx = dy * scale, or 0.

#include "factors.cuh"
#include "mask.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename A>
__device__ __forceinline__ A gradient_of(const GradientFactors<A>& factors, bool counts, bool zeroes, A dy, A x) {
  if (counts) return factors.gradient(dy, x);
  return zeroes ? A(0) : dy * factors.scale;
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_masked_backward_elemt(Planar plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                                 Mask mask, bool zeroes, BackwardElemtArguments arguments) {
  PlanarWalk<W> walk(plan, true);
  const int64_t end = samples_end(plan, true);
  MaskedSlots<kPairs<W>, W> at;
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    at.next(walk, end);
    load_pairs(walk, dy, x, at.slots, grads, values);
    return at.bits(mask, plan, walk.channel);
  };
  bool more = !walk.done();
  unsigned valid = load();
  const auto factors = gradient_factors<A>(walk, plan.channels, arguments);
  while (more) {
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const bool counts = (valid >> (u * W + j) & 1) != 0;
        values[u].values[j] =
            narrow<T>(gradient_of(factors, counts, zeroes, widen(grads[u].values[j]), widen(values[u].values[j])));
      }
      store_slot(dx, at.slots[u], values[u]);
    }
    more = !walk.done();
    valid = load();
  }
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    interleaved_masked_backward_elemt(Interleaved plan, const T* __restrict__ dy, const T* __restrict__ x,
                                      T* __restrict__ dx, Mask mask, bool zeroes, BackwardElemtArguments arguments) {
  InterleavedWalk<W> walk(plan, true);
  MaskedRows<kPairs<W>, W> at;
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    at.next(walk);
    load_offsets(dy, at.offsets, grads);
    load_offsets(x, at.offsets, values);
    return at.bits(mask);
  };
  bool more = !walk.done();
  unsigned valid = load();
  GradientFactors<A> factors[W];
  gradient_factors(factors, walk, plan.channels, arguments);
  while (more) {
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
      if (at.offsets[u] < 0) break;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        values[u].values[w] = narrow<T>(gradient_of(factors[w], (valid >> u & 1) != 0, zeroes,
                                                    widen(grads[u].values[w]), widen(values[u].values[w])));
      }
      store_pack(dx + at.offsets[u], values[u]);
    }
    more = !walk.done();
    valid = load();
  }
}

template <typename T, int W>
struct MaskedBackwardElemt {
  static constexpr auto planar = planar_masked_backward_elemt<T, W>;
  static constexpr auto interleaved = interleaved_masked_backward_elemt<T, W>;
};

}  // namespace

const char* masked_backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                                  const Mask& mask, bool zeroes, const BackwardElemtArguments& arguments,
                                  Stream stream) {
  return dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    return launch_elementwise<MaskedBackwardElemt, T>(g, {dy, x, dx}, stream, static_cast<const T*>(dy),
                                                      static_cast<const T*>(x), static_cast<T*>(dx), mask, zeroes,
                                                      arguments);
  });
}

}  // namespace bagua_syncbn::cuda
