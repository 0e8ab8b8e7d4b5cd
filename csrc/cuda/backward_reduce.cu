// batch_norm_backward_reduce: sum of g and of g * (x - mean) of each channel, and from them the gradients of weight and
// bias of this rank; g = dy * act'(z), which it may store.
//
// Threads are mapped to data as in stats.cu, over two tensors at once: a thread has half as many slots of each under
// way. A batch is added up before it is added to the sums of the thread, and all levels above it are those of
// reduce.cuh.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename Plan, typename Epilogue>
struct Traits {
  static constexpr bool kActivates = Epilogue::kActivates, kPlanar = std::is_same_v<Plan, Planar>;
  // Whether a batch is added up before it is added to the sums: else there are no registers for it.
  static constexpr bool kAddsUp = !kActivates || kPlanar;
  static constexpr int kUnroll = kActivates ? 1 : kPairs<W>;  // the code of all activations is long
  // Blocks for which a multiprocessor has the registers: with one more the compiler spills, or puts off a load. 0: as
  // many as the compiler sees fit.
  static constexpr int resident() {
    if (kActivates) return sizeof(T) == 4 ? 3 : 2;
    if (kPlanar) return 0;
    return sizeof(T) == 8 ? 2 : 3;
  }
};

template <typename T, int W, typename Plan, typename Epilogue, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, Traits<T, W, Plan, Epilogue>::resident())
    backward_reduce(Plan plan, const T* dy, const T* x, T* __restrict__ grad, BackwardReduceArguments arguments,
                    Epilogue epilogue, Scratch scratch) {
  using Slots = Batch<Plan, W, kPairs<W>, Everywhere>;
  constexpr bool kAddsUp = Traits<T, W, Plan, Epilogue>::kAddsUp;
  using Factors = std::conditional_t<Epilogue::kActivates, NormalizeFactors<A>, Center<A>>;
  constexpr int kLanes = Slots::kLanes;
  constexpr Everywhere everywhere;
  Slots batch(plan, everywhere, false);
  Loaded<T, W, kPairs<W>, Read::kAgain> grads, values, residuals;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
    if (epilogue.residual != nullptr) residuals.load(epilogue.residual, batch);
    batch.read_mask();
  };
  load();
  Factors factors[kLanes] = {};  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return Factors(arguments, c); });
  Sums<A> sums[kLanes] = {};
  while (batch.any) {
    Sums<A> added[kLanes] = {};
#pragma unroll(Traits<T, W, Plan, Epilogue>::kUnroll)
    for (int u = 0; u < kPairs<W>; ++u) {
      const auto slot = batch.pop();
      const Pack<T, W> dy_slot = grads.pop(), x_slot = values.pop();
      A g[W];
      if constexpr (Epilogue::kActivates) {
        normalize(factors, x_slot, g);
        if (epilogue.residual != nullptr) add(residuals.pop(), g);
        epilogue.template apply<true>(g);
      }
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A dy_value = widen(dy_slot.values[w]), deviation = widen(x_slot.values[w]) - factors[w % kLanes].mean;
        g[w] = Epilogue::kActivates ? g[w] * dy_value : dy_value;
        if (slot.counts(w)) (kAddsUp ? added : sums)[w % kLanes].add(g[w], g[w] * deviation);
      }
      if (Epilogue::kActivates && grad != nullptr) slot.store(grad, narrow_all<T>(g));
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sums[lane].add(added[lane].first, added[lane].second);
    if (batch.walk.done()) break;
    load();
  }
  double uncounted = 0;
  Sums<double> total = Sums<double>::unpacked(reduce_threads<Plan>(sums, uncounted).packed());
  if (!merge_parts(total, uncounted, plan, batch.walk, scratch)) return;
  write_sums<A>(arguments, plan.channels, batch.walk.first_channel() + thread_index(), total);
}

template <template <typename> class Epilogue>
struct BackwardReduce {
  template <typename T, int W>
  struct Kernels {
    static constexpr auto planar = backward_reduce<T, W, Planar, Epilogue<T>>;
    static constexpr auto interleaved = backward_reduce<T, W, Interleaved, Epilogue<T>>;
  };
};

}  // namespace

const char* backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                            const BackwardReduceArguments& arguments, const Options& options, Workspace& workspace,
                            Stream stream) {
  const auto or_x = [&](const void* tensor) { return tensor == nullptr ? x : tensor; };
  const std::initializer_list<const void*> tensors = {dy, x, or_x(options.residual), or_x(grad)};
  const auto start = [&](auto op) {
    return launch_reduction<decltype(op)::template Kernels>(dtype, g, tensors, workspace, stream, In{dy}, In{x},
                                                            Out{grad}, arguments, EpilogueOf{options});
  };
  return options.act.code != 0 || grad != nullptr ? start(BackwardReduce<Activated>()) : start(BackwardReduce<Plain>());
}

}  // namespace bagua_syncbn::cuda
