// batch_norm_masked_backward_reduce: as backward_reduce.cu, of the positions that count.

#include "factors.cuh"
#include "mask.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, W == 8 ? 2 : 4)
    masked_backward_reduce(Plan plan, const T* dy, const T* x, Mask mask, BackwardReduceArguments arguments,
                           Scratch scratch) {
  MaskedBatch<Plan, W, kPairs<W>> batch(plan, mask, false);
  constexpr int kLanes = batch.kLanes;
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  batch.load(dy, x, grads, values);
  A centers[kLanes] = {};  // waited for together with the first batch
  share_factors(centers, batch.walk, [&](int64_t c) { return read_channel<A>(arguments.mean, c); });
  Sums<A> sums[kLanes] = {};
  while (batch.any) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      Sums<A> added{0, 0};
#pragma unroll
      for (int u = 0; u < kPairs<W>; ++u) {
#pragma unroll
        for (int w = lane; w < W; w += kLanes) {
          const A grad = widen(grads[u].values[w]), deviation = widen(values[u].values[w]) - centers[lane];
          if (batch.counts(u, w)) added.add(grad, grad * deviation);
        }
      }
      sums[lane].add(added.first, added.second);
    }
    batch.load(dy, x, grads, values);
  }
  merge_and_write(sums, plan, batch.walk, arguments, scratch);
}

template <typename T, int W>
struct MaskedBackwardReduce {
  static constexpr auto planar = masked_backward_reduce<T, W, Planar>;
  static constexpr auto interleaved = masked_backward_reduce<T, W, Interleaved>;
};

}  // namespace

const char* masked_backward_reduce(const void* dy, const void* x, DType dtype, const Geometry& g, const Mask& mask,
                                   const BackwardReduceArguments& arguments, Workspace& workspace, Stream stream) {
  return launch_reduction<MaskedBackwardReduce>(dtype, g, {dy, x}, workspace, stream, In{dy}, In{x}, mask, arguments);
}

}  // namespace bagua_syncbn::cuda
