// batch_norm_backward_elemt: dx = ((g - mean_g) - (x - mean) * projection) * scale, the gradient of the input. The
// kernel recomputes g = dy * act'(z), which is cheaper than to store and load it. Positions that a mask excludes get
// dy * scale.
//
// Threads are mapped to data as in elemt.cu. The factors come from the sums and the count of all ranks, which are on
// the device. In place, a thread loads a slot before it stores to it; no thread uses the values that others store,
// which are in slots that the end of a row cuts short.

#include "act.cuh"
#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Checks that all ranks sent the same header with their sums. A thread checks each pair of values, which it loads when
// this is constructed, to wait for them together with the factors. Used by all threads of the block.
class HeaderCheck {
 public:
  __device__ __forceinline__ HeaderCheck(const BackwardElemtArguments& arguments, int64_t channels)
      : arguments_(arguments), checks_(2 * thread_index() < arguments.header_size) {
    if (!checks_) return;
    sum_ = {arguments.sums, 2 * (channels + thread_index())};
    squares_ = {arguments.sums, 2 * (channels + thread_index()) + 1};
  }

  __device__ __forceinline__ bool passes() const {
    const bool differs = checks_ && !sums_agree(sum_.as<double>(), squares_.as<double>(), arguments_.ranks);
    const bool same = __syncthreads_and(!differs);
    if (!same && blockIdx.x == 0 && blockIdx.y == 0 && thread_index() == 0)
      record_fault<double>(arguments_.fault, {Fault::kSum, arguments_.call}, nullptr, 0, 0);
    return same;
  }

 private:
  const BackwardElemtArguments& arguments_;
  bool checks_;
  ChannelValue sum_, squares_;
};

template <typename Traits>
__global__ void __launch_bounds__(kThreads, Traits::resident())
    backward_elemt_kernel(typename Traits::Plan plan, const typename Traits::T* dy,
                          const typename Traits::T* __restrict__ x, typename Traits::T* dx,
                          BackwardElemtArguments arguments, Mask mask, Act<typename Traits::A> act) {
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
  const HeaderCheck header(arguments, plan.channels);
  GradientFactors<A> factors[kLanes];  // waited for together with the first batch
  share_factors<Traits>(factors, batch, [&](int64_t c) { return GradientFactors<A>(arguments, plan.channels, c); });
  if (!header.passes()) {  // makes every gradient NaN
#pragma unroll
    for (auto& each : factors) each.scale = static_cast<A>(NAN);
  }
  while (batch.any) {
#pragma unroll(Traits::kUnroll)
    for (int u = 0; u < Traits::kSlots; ++u) {
      const auto slot = batch.pop();
      const auto dy_slot = grads.pop(), x_slot = values.pop();
      A g[kWidth];
      if constexpr (kActivates) {
        normalize(factors, x_slot, g);
        activate<true>(g, act);
      }
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        const GradientFactors<A>& own = factors[w % kLanes];
        const A dy_value = widen(dy_slot.values[w]);
        g[w] = kActivates ? g[w] * dy_value : dy_value;
        g[w] = kMasked && !slot.counts(w) ? g[w] * own.scale : own.gradient(g[w], widen(x_slot.values[w]));
      }
      store_slot(dx, slot.slot, narrow_all<typename Traits::T>(g));
    }
    if (batch.walk.done()) break;
    load();
  }
}

}  // namespace

void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const Mask* mask, const Epilogue& epilogue,
                    Device& device) {
  const auto tensors = {dy, x, static_cast<const void*>(dx)};
  const auto start = [&](auto traits, const auto& plan) {
    Kernel<backward_elemt_kernel<decltype(traits)>>::launch(plan.grid(), plan.block(), device.stream, plan, dy, x, dx,
                                                            arguments, mask == nullptr ? Mask{} : *mask, epilogue.act);
  };
  if (mask != nullptr) return choose_kernel<Op::kBackwardElemt, true, false>(dtype, g, tensors, start);
  if (epilogue.act.code != 0) return choose_kernel<Op::kBackwardElemt, false, true>(dtype, g, tensors, start);
  choose_kernel<Op::kBackwardElemt, false, false>(dtype, g, tensors, start);
}

}  // namespace bagua_syncbn::cuda
