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

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 3)
    masked_backward_elemt(Plan plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, Mask mask,
                          bool zeroes, BackwardElemtArguments arguments) {
  MaskedBatch<Plan, W, kPairs<W>> batch(plan, mask, true);
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  batch.load(dy, x, grads, values);
  GradientFactors<A> factors[batch.kLanes];  // waited for together with the first batch
  gradient_factors(factors, batch.walk, plan.channels, arguments);
  while (batch.any) {
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
      if (batch.ends_before(u)) break;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A dy_value = widen(grads[u].values[w]), x_value = widen(values[u].values[w]);
        values[u].values[w] =
            narrow<T>(gradient_of(factors[w % batch.kLanes], batch.counts(u, w), zeroes, dy_value, x_value));
      }
      batch.store(dx, u, values[u]);
    }
    batch.load(dy, x, grads, values);
  }
}

template <typename T, int W>
struct MaskedBackwardElemt {
  static constexpr auto planar = masked_backward_elemt<T, W, Planar>;
  static constexpr auto interleaved = masked_backward_elemt<T, W, Interleaved>;
};

}  // namespace

const char* masked_backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                                  const Mask& mask, bool zeroes, const BackwardElemtArguments& arguments,
                                  Stream stream) {
  return launch_elementwise<MaskedBackwardElemt>(dtype, g, {dy, x, dx}, stream, In{dy}, In{x}, Out{dx}, mask, zeroes,
                                                 arguments);
}

}  // namespace bagua_syncbn::cuda
