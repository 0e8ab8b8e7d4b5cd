// batch_norm_act_elemt: y = act((x - mean) * invstd * weight + bias + residual).
//
// Threads are mapped to data as in elemt.cu, with half as many slots of each of the two inputs under way.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    act_elemt(Plan plan, const T* __restrict__ x, const T* __restrict__ residual, T* __restrict__ y,
              ElemtArguments arguments, Act<A> act) {
  constexpr int kLanes = Batch<Plan, W, kPairs<W>>::kLanes;
  Batch<Plan, W, kPairs<W>> batch(plan, true);
  Loaded<T, W> values, residuals;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    if (residual != nullptr) residuals.load(residual, batch);
  };
  load();
  NormalizeFactors<A> factors[kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return NormalizeFactors<A>(arguments, c); });
  while (batch.any) {
#pragma unroll 1  // the code of all activations is long
    for (int u = 0; u < kPairs<W>; ++u) {
      A z[W];
      normalize(factors, values.take_slot(), z);
      if (residual != nullptr) add(residuals.take_slot(), z);
      activate<false>(z, act);
      store_slot(y, take(batch.slots), narrow_all<T>(z));
    }
    load();
  }
}

template <typename T, int W>
struct ActElemt {
  static constexpr auto planar = act_elemt<T, W, Planar>;
  static constexpr auto interleaved = act_elemt<T, W, Interleaved>;
};

}  // namespace

const char* act_elemt(const void* x, const void* residual, void* y, DType dtype, const Geometry& g,
                      const ElemtArguments& arguments, const Act<double>& act, Stream stream) {
  return launch_elementwise<ActElemt>(dtype, g, {x, y, residual == nullptr ? x : residual}, stream, In{x}, In{residual},
                                      Out{y}, arguments, ActOf{act});
}

}  // namespace bagua_syncbn::cuda
