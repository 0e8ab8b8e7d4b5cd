// batch_norm_backward_reduce: sum of g and of g * (x - mean) of each channel, and from them the gradients of weight and
// bias of this rank; g = dy * act'(z), which it may store.
//
// Threads are mapped to data as in stats.cu, over two tensors at once: a thread has half as many slots of each under
// way. A batch is added up before it is added to the sums of the thread, and all levels above it are those of
// reduce.cuh.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename Plan, bool kActivates>
struct Traits {
  static constexpr bool kPlanar = std::is_same_v<Plan, Planar>;
  // Whether a batch is added up before it is added to the sums: else there are no registers for it.
  static constexpr bool kAddsUp = !kActivates || kPlanar;
  static constexpr int kUnroll = kActivates ? 1 : kPairs<W>;  // the code of all activations is long
  // Blocks for which a multiprocessor has the registers: with one more the compiler spills, or puts off a load. 0: as
  // many as the compiler sees fit. nvcc 12.4 still spills one register for sm_90, of interleaved float with an
  // activation: it is stored before the loop and loaded after it.
  static constexpr int resident() {
    if (kActivates) return sizeof(T) == 4 ? 3 : 2;
    if (kPlanar) return W == 1 ? 4 : 0;
    return sizeof(T) == 8 ? 2 : 3;
  }
};

// Without an activation, `residual` and `act` are not used.
template <typename T, int W, typename Plan, bool kActivates, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, Traits<T, W, Plan, kActivates>::resident())
    backward_reduce(Plan plan, const T* dy, const T* x, T* __restrict__ grad, BackwardReduceArguments arguments,
                    const T* residual, Act<A> act, Scratch scratch) {
  using Slots = Batch<Plan, W, kPairs<W>>;
  constexpr bool kAddsUp = Traits<T, W, Plan, kActivates>::kAddsUp;
  using Own = std::conditional_t<kActivates, NormalizeFactors<A>, Center<A>>;
  constexpr int kLanes = Slots::kLanes;
  Slots batch(plan, false);
  Loaded<T, W, kPairs<W>, Read::kAgain> grads, values, residuals;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
    if (kActivates && residual != nullptr) residuals.load(residual, batch);
    batch.read_mask();
  };
  load();
  Own factors[kLanes] = {};  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return Own(arguments.factors, c); });
  Sums<A> sums[kLanes] = {};
  while (batch.any) {
    Sums<A> added[kLanes] = {};
#pragma unroll(Traits<T, W, Plan, kActivates>::kUnroll)
    for (int u = 0; u < kPairs<W>; ++u) {
      const auto slot = batch.pop();
      const Pack<T, W> dy_slot = grads.pop(), x_slot = values.pop();
      A g[W];
      if constexpr (kActivates) {
        normalize(factors, x_slot, g);
        if (residual != nullptr) add(residuals.pop(), g);
        activate<true>(g, act);
      }
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A dy_value = widen(dy_slot.values[w]), deviation = widen(x_slot.values[w]) - factors[w % kLanes].mean;
        g[w] = kActivates ? g[w] * dy_value : dy_value;
        if (slot.counts(w)) (kAddsUp ? added : sums)[w % kLanes].add(g[w], g[w] * deviation);
      }
      if (kActivates && grad != nullptr) store_slot(grad, slot.slot, narrow_all<T>(g));
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sums[lane].add(added[lane].first, added[lane].second);
    if (batch.walk.done()) break;
    load();
  }
  double uncounted = 0;
  Sums<double> total = Sums<double>::unpacked(reduce_threads(batch.walk, sums, uncounted).packed());
  if (!merge_parts(total, uncounted, plan, batch.walk, scratch)) return;
  write_sums<A>(arguments, plan.channels, batch.walk.first_channel() + thread_index(), total);
}

template <bool kActivates>
struct BackwardReduce {
  static constexpr int kEntries = 1;
  template <typename T, int W, typename Plan>
  static constexpr auto kernel = backward_reduce<T, W, Plan, kActivates>;
};

}  // namespace

void backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device& device) {
  const auto or_x = [&](const void* tensor) { return tensor == nullptr ? x : tensor; };
  const std::initializer_list<const void*> tensors = {dy, x, or_x(epilogue.residual), or_x(grad)};
  const auto start = [&](auto op) {
    launch_reduction<decltype(op)>(dtype, g, tensors, device, dy, x, grad, arguments, epilogue.residual, epilogue.act);
  };
  return epilogue.act.code != 0 || grad != nullptr ? start(BackwardReduce<true>()) : start(BackwardReduce<false>());
}

}  // namespace bagua_syncbn::cuda
