// batch_norm_backward_reduce: per-channel sums of g = dy * act'(z) and g * (x - mean), and this rank's gradients of
// weight and bias. Optionally stores g.
//
// A thread sums a batch before it adds it to its total. The block sums over its threads, and merge_sums sums over a
// channel's parts, in double.

#include "normalize.cuh"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Sums of g and g * (x - mean) over a channel's part.
using Part = Sums<double, 1>;

template <typename A>
__device__ __forceinline__ void write_sums(const BackwardReduceArguments& arguments, int64_t channels, int64_t c,
                                           const Part& total) {
  A* const sums = static_cast<A*>(arguments.sums);
  sums[c] = static_cast<A>(total.first[0]);
  sums[channels + c] = static_cast<A>(total.second[0]);
  if (c == 0) pack_header(sums + 2 * channels, arguments.header);
  write_channel(arguments.grad_bias, c, total.first[0]);
  write_channel(arguments.grad_weight, c, total.second[0] * ChannelValue(arguments.factors.invstd, c).as<double>());
}

// `residual`, `activation` and `parameter` are unused unless Traits::kActivates.
template <typename Traits>
__global__ void __launch_bounds__(kThreads, Traits::resident())
    backward_reduce_kernel(typename Traits::Plan plan, const typename Traits::T* dy, const typename Traits::T* x,
                           typename Traits::T* __restrict__ grad_buffer, BackwardReduceArguments arguments,
                           const typename Traits::T* residual, int64_t activation, typename Traits::A parameter,
                           Part* parts) {
  using A = typename Traits::A;
  constexpr bool kActivates = Traits::kActivates;
  constexpr int kWidth = Traits::kWidth, kLanes = Traits::kLanes;
  // Interleaved kernels with an activation lack registers for batch sums.
  constexpr bool kSumsBatch = !kActivates || Traits::kPlanar;
  Batch<Traits> batch(plan, false);
  Loaded<Traits> grads, values, residuals;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
    if (kActivates && residual != nullptr) residuals.load(residual, batch);
    batch.read_mask();
  };
  load();
  NormalizeFactors<A> factors[kLanes] = {};  // arrives together with the first batch
  share_factors<Traits>(factors, batch, [&](int64_t c) { return NormalizeFactors<A>(arguments.factors, c); });
  Sums<A, kLanes> sums{};
  while (batch.any) {
    Sums<A, kLanes> added{};
#pragma unroll(Traits::kUnroll)
    for (int u = 0; u < Traits::kSlots; ++u) {
      const auto dy_slot = grads.pop(), x_slot = values.pop();
      A g[kWidth];
      if constexpr (kActivates) {
        normalize(factors, x_slot, g);
        if (residual != nullptr) add(residuals.pop(), g);
        activate<true>(g, activation, parameter);
      }
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        const A dy_value = widen(dy_slot.values[w]), deviation = widen(x_slot.values[w]) - factors[w % kLanes].mean;
        g[w] = kActivates ? g[w] * dy_value : dy_value;
        // An empty interleaved slot has zeros, which add nothing.
        if (!Traits::kPlanar || batch.counts(w, 0)) (kSumsBatch ? added : sums).add(w % kLanes, g[w], g[w] * deviation);
      }
      if (kActivates && grad_buffer != nullptr) store_slot(grad_buffer, batch.slots[0], g);
      batch.pop();
    }
    if (kSumsBatch) sums.merge(added);
    if (batch.walk.done()) break;
    load();
  }
  const Sums<A, 1> block = reduce_block<Traits::kTile>(sums, batch.walk.columns());
  const int64_t c = batch.walk.own_channel();
  if (c < 0) return;
  const Part part{{block.first[0]}, {block.second[0]}};
  if (parts == nullptr) return write_sums<A>(arguments, plan.channels, c, part);
  parts[c * plan.parts + batch.walk.part] = part;
}

template <typename A>
__global__ void __launch_bounds__(kThreads)
    merge_sums(int64_t count, const Part* parts, int64_t channels, BackwardReduceArguments arguments) {
  Part sums{};
  for (int64_t p = threadIdx.x; p < count; p += blockDim.x) sums.merge(parts[blockIdx.x * count + p]);
  sums = reduce_block(sums);
  if (threadIdx.x == 0) write_sums<A>(arguments, channels, blockIdx.x, sums);
}

}  // namespace

void backward_reduce(const void* dy, const void* x, void* grad_buffer, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device& device) {
  const auto or_x = [&](const void* tensor) { return tensor == nullptr ? x : tensor; };
  const std::initializer_list<const void*> tensors = {dy, x, or_x(epilogue.residual), or_x(grad_buffer)};
  const auto start = [&](auto traits, const auto& plan) {
    using Chosen = decltype(traits);
    Part* const parts = allocate_parts<Part>(device, plan);
    Kernel<backward_reduce_kernel<Chosen>>::launch(plan.grid(), plan.block(), device.stream, plan, dy, x, grad_buffer,
                                                   arguments, epilogue.residual, epilogue.activation,
                                                   epilogue.parameter, parts);
    if (parts != nullptr) launch_merge<merge_sums<typename Chosen::A>>(device, plan, parts, arguments);
  };
  const bool activates = epilogue.activation != 0 || grad_buffer != nullptr;
  if (activates) return choose_kernel<Op::kBackwardReduce, false, true>(dtype, g, tensors, start);
  choose_kernel<Op::kBackwardReduce, false, false>(dtype, g, tensors, start);
}

}  // namespace bagua_syncbn::cuda
