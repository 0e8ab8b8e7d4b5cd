// batch_norm_act_backward_reduce: sum of g and of g * (x - mean) of each channel, and from them the gradients of weight
// and bias of this rank; g = dy * act'(z), which it may store.
//
// Threads are mapped to data as in backward_reduce.cu. A slot is added up before it is added to the sums of the thread
// where all of it is of one channel.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 2)
    act_backward_reduce(Plan plan, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ residual,
                        T* __restrict__ grad, ElemtArguments normalization, BackwardReduceArguments arguments,
                        Act<A> act, Scratch scratch) {
  constexpr int kLanes = Batch<Plan, W, kPairs<W>>::kLanes;
  Batch<Plan, W, kPairs<W>> batch(plan, false);
  Loaded<T, W> grads, values, residuals;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
    if (residual != nullptr) residuals.load(residual, batch);
  };
  load();
  NormalizeFactors<A> factors[kLanes] = {};  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return NormalizeFactors<A>(normalization, c); });
  Sums<A> sums[kLanes] = {};
  while (batch.any) {
#pragma unroll 1  // the code of all activations is long
    for (int u = 0; u < kPairs<W>; ++u) {
      const Slot<W> slot = take(batch.slots);
      const Pack<T, W> dy_slot = grads.take_slot(), x_slot = values.take_slot();
      A z[W];
      normalize(factors, x_slot, z);
      if (residual != nullptr) add(residuals.take_slot(), z);
      activate<true>(z, act);
      Sums<A> of_slot{0, 0};
#pragma unroll
      for (int w = 0; w < W; ++w) {
        z[w] *= widen(dy_slot.values[w]);
        const A deviation = widen(x_slot.values[w]) - factors[w % kLanes].mean;
        if (slot.holds(w)) (kLanes == 1 ? of_slot : sums[w % kLanes]).add(z[w], z[w] * deviation);
      }
      if (kLanes == 1) sums[0].add(of_slot.first, of_slot.second);
      if (grad != nullptr) store_slot(grad, slot, narrow_all<T>(z));
    }
    load();
  }
  merge_and_write(sums, plan, batch.walk, arguments, scratch);
}

template <typename T, int W>
struct ActBackwardReduce {
  static constexpr auto planar = act_backward_reduce<T, W, Planar>;
  static constexpr auto interleaved = act_backward_reduce<T, W, Interleaved>;
};

}  // namespace

const char* act_backward_reduce(const void* dy, const void* x, const void* residual, void* grad, DType dtype,
                                const Geometry& g, const ElemtArguments& normalization,
                                const BackwardReduceArguments& arguments, const Act<double>& act, Workspace& workspace,
                                Stream stream) {
  const std::initializer_list<const void*> tensors = {dy, x, residual == nullptr ? x : residual,
                                                      grad == nullptr ? x : grad};
  return launch_reduction<ActBackwardReduce>(dtype, g, tensors, workspace, stream, In{dy}, In{x}, In{residual},
                                             Out{grad}, normalization, arguments, ActOf{act});
}

}  // namespace bagua_syncbn::cuda
