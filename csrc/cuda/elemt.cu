// batch_norm_elemt: y = act((x - mean) * invstd * weight + bias + residual). The mean is subtracted first: folding it
// into the bias would lose precision if the mean is large compared to the deviation.

#include "launch.cuh"
#include "normalize.cuh"

namespace bagua_syncbn::cuda {
namespace {

// `residual`, `activation` and `parameter` are unused unless Traits::kActivates.
template <typename Traits>
__global__ void __launch_bounds__(kThreads, Traits::resident())
    elemt_kernel(typename Traits::Plan plan, const typename Traits::T* __restrict__ x,
                 typename Traits::T* __restrict__ y, Factors tensors, const typename Traits::T* residual,
                 int64_t activation, typename Traits::A parameter) {
  using A = typename Traits::A;
  constexpr bool kActivates = Traits::kActivates;
  Batch<Traits> batch(plan, true);
  Loaded<Traits> values, residuals;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    if (kActivates && residual != nullptr) residuals.load(residual, batch);
  };
  load();
  NormalizeFactors<A> factors[Traits::kLanes];  // arrives together with the first batch
  share_factors<Traits>(factors, batch, [&](int64_t c) { return NormalizeFactors<A>(tensors, c); });
  while (batch.any) {
#pragma unroll(Traits::kUnroll)
    for (int u = 0; u < Traits::kSlots; ++u) {
      A z[Traits::kWidth];
      normalize(factors, values.pop(), z);
      if (kActivates && residual != nullptr) add(residuals.pop(), z);
      if (kActivates) activate<false>(z, activation, parameter);
      store_slot(y, batch.slots[0], z);
      batch.pop();
    }
    if (batch.walk.done()) break;
    load();
  }
}

}  // namespace

void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors, const Epilogue& epilogue,
           Device& device) {
  const auto tensors = {x, static_cast<const void*>(y), epilogue.residual == nullptr ? x : epilogue.residual};
  const auto start = [&](auto traits, const auto& plan) {
    Kernel<elemt_kernel<decltype(traits)>>::launch(plan.grid(), plan.block(), device.stream, plan, x, y, factors,
                                                   epilogue.residual, epilogue.activation, epilogue.parameter);
  };
  const bool activates = epilogue.activation != 0 || epilogue.residual != nullptr;
  if (activates) return choose_kernel<Op::kElemt, false, true>(dtype, g, tensors, start);
  choose_kernel<Op::kElemt, false, false>(dtype, g, tensors, start);
}

}  // namespace bagua_syncbn::cuda
