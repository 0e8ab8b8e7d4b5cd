// batch_norm_backward_elemt: dx = ((g - mean_g) - (x - mean) * projection) * scale, the gradient of the input.
// Recomputes g = dy * act'(z), which is cheaper than storing and loading it. At invalid positions, dx = dy * scale.
//
// In-place: a thread loads a slot before it stores to it. Threads can share a slot at the end of a row; each ignores
// the other's values.

#include "launch.cuh"
#include "normalize.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename Traits>
__global__ void __launch_bounds__(kThreads, Traits::resident())
    backward_elemt_kernel(typename Traits::Plan plan, const typename Traits::T* dy,
                          const typename Traits::T* __restrict__ x, typename Traits::T* dx,
                          BackwardElemtArguments arguments, const uint8_t* mask, int64_t activation,
                          typename Traits::A parameter) {
  using A = typename Traits::A;
  constexpr bool kActivates = Traits::kActivates, kMasked = Traits::kMasked;
  constexpr int kWidth = Traits::kWidth, kLanes = Traits::kLanes;
  Batch<Traits> batch(plan, true, mask);
  Loaded<Traits> grads, values;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
    if (kMasked) batch.read_mask();
  };
  load();
  // The first threads each check a pair of words, to detect ranks that sent different headers. The result arrives
  // together with the factors and the first batch.
  const A* const header = static_cast<const A*>(arguments.sums) + 2 * (plan.channels + thread_index());
  const bool checks = 2 * thread_index() < arguments.header_size;
  const A sum = checks ? header[0] : A(0), squares = checks ? header[1] : A(0);
  GradientFactors<A> factors[kLanes];
  share_factors<Traits>(factors, batch, [&](int64_t c) { return GradientFactors<A>(arguments, plan.channels, c); });
  if (!__syncthreads_and(sums_agree(sum, squares, arguments.ranks))) {
    if (blockIdx.x + blockIdx.y == 0 && thread_index() == 0)
      record_fault<A>(arguments.fault, {Fault::kSum, arguments.message_number}, nullptr, 0, 0);
#pragma unroll  // makes every gradient NaN
    for (auto& each : factors) each.scale = static_cast<A>(NAN);
  }
  while (batch.any) {
#pragma unroll(Traits::kUnroll)
    for (int u = 0; u < Traits::kSlots; ++u) {
      const auto dy_slot = grads.pop(), x_slot = values.pop();
      A g[kWidth];
      if constexpr (kActivates) {
        normalize(factors, x_slot, g);
        activate<true>(g, activation, parameter);
      }
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        const GradientFactors<A>& own = factors[w % kLanes];
        const A dy_value = widen(dy_slot.values[w]);
        g[w] = kActivates ? g[w] * dy_value : dy_value;
        g[w] = kMasked && !batch.counts(w, 0) ? g[w] * own.scale : own.gradient(g[w], widen(x_slot.values[w]));
      }
      store_slot(dx, batch.slots[0], g);
      batch.pop();
    }
    if (batch.walk.done()) break;
    load();
  }
}

}  // namespace

void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const uint8_t* mask, const Epilogue& epilogue,
                    Device& device) {
  const auto tensors = {dy, x, static_cast<const void*>(dx)};
  const auto start = [&](auto traits, const auto& plan) {
    Kernel<backward_elemt_kernel<decltype(traits)>>::launch(plan.grid(), plan.block(), device.stream, plan, dy, x, dx,
                                                            arguments, mask, epilogue.activation, epilogue.parameter);
  };
  if (mask != nullptr) return choose_kernel<Op::kBackwardElemt, true, false>(dtype, g, tensors, start);
  if (epilogue.activation != 0) return choose_kernel<Op::kBackwardElemt, false, true>(dtype, g, tensors, start);
  choose_kernel<Op::kBackwardElemt, false, false>(dtype, g, tensors, start);
}

}  // namespace bagua_syncbn::cuda
