// batch_norm_act_backward_elemt: dx = ((g - mean_g) - (x - mean) * projection) * scale, the gradient of the input, of
// g = dy * act'(z), which backward_reduce has made too, and not stored: memory is what all of this waits for.
//
// Threads are mapped to data as in backward_elemt.cu.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Of the gradient, and of z.
template <typename A>
struct ActGradientFactors : GradientFactors<A> {
  A shift;

  __device__ __forceinline__ A normalize(A x) const { return (x - this->mean) * this->scale + shift; }
};

template <typename A>
__device__ __forceinline__ ActGradientFactors<A> read_factors(const BackwardElemtArguments& arguments,
                                                              const PerChannel& bias, int64_t channels, int64_t c) {
  const ChannelValue loaded_bias = load_channel(bias, c);
  return {GradientFactors<A>(arguments, channels, c), bias.data == nullptr ? A(0) : loaded_bias.as<A>()};
}

template <typename A, int K>
__device__ __forceinline__ void spoil(ActGradientFactors<A> (&factors)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) factors[k].scale = static_cast<A>(NAN);
}

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 2)
    act_backward_elemt(Plan plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                       BackwardElemtArguments arguments, PerChannel bias, Act<A> act) {
  constexpr int kLanes = Batch<Plan, W, kPairs<W>>::kLanes;
  Batch<Plan, W, kPairs<W>> batch(plan, true);
  Loaded<T, W> grads, values;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
  };
  load();
  const Agreement agreement(arguments, plan.channels);
  ActGradientFactors<A> factors[kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return read_factors<A>(arguments, bias, plan.channels, c); });
  if (!agreement.holds()) spoil(factors);
  while (batch.any) {
#pragma unroll 1  // the code of all activations is long
    for (int u = 0; u < kPairs<W>; ++u) {
      const Pack<T, W> dy_slot = grads.take_slot(), x_slot = values.take_slot();
      A z[W];
      normalize(factors, x_slot, z);
      activate<true>(z, act);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        z[w] = factors[w % kLanes].gradient(widen(dy_slot.values[w]) * z[w], widen(x_slot.values[w]));
      }
      store_slot(dx, take(batch.slots), narrow_all<T>(z));
    }
    load();
  }
}

template <typename T, int W>
struct ActBackwardElemt {
  static constexpr auto planar = act_backward_elemt<T, W, Planar>;
  static constexpr auto interleaved = act_backward_elemt<T, W, Interleaved>;
};

}  // namespace

const char* act_backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                               const BackwardElemtArguments& arguments, const PerChannel& bias, const Act<double>& act,
                               Stream stream) {
  return launch_elementwise<ActBackwardElemt>(dtype, g, {dy, x, dx}, stream, In{dy}, In{x}, Out{dx}, arguments, bias,
                                              ActOf{act});
}

}  // namespace bagua_syncbn::cuda
