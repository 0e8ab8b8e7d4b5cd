// batch_norm_backward_reduce: sum of dy and of dy * (x - mean) of each channel, and from them the gradients of weight
// and bias of this rank.
//
// Threads are mapped to data as in stats.cu, over two tensors at once: a thread has half as many slots of each under
// way. A batch is added up before it is added to the sums of the thread, and all levels above it are those of
// reduce.cuh.

#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

struct Results {
  Channels invstd;
  GradOutputs outputs;
};

template <typename A>
__device__ __forceinline__ void write_sums(const Results& results, int64_t channels, int64_t c,
                                           const Sums<double>& sums) {
  static_cast<A*>(results.outputs.sums)[c] = static_cast<A>(sums.first);
  static_cast<A*>(results.outputs.sums)[channels + c] = static_cast<A>(sums.second);
  write_channel(results.outputs.grad_bias, c, sums.first);
  write_channel(results.outputs.grad_weight, c, sums.second * read_channel<double>(results.invstd, c));
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_backward_reduce(const T* dy, const T* x, Planar plan, int misaligned, Channels mean, Results results,
                           double2* partials, uint32_t* tickets) {
  constexpr int kPairs = kSlots<W> / 2;
  PlanarWalk<W> walk(plan, misaligned, false);
  const A center = read_channel<A>(mean, walk.channel);
  Sums<A> sums{0, 0};
  while (!walk.done()) {
    Slot<W> slots[kPairs];
    Pack<T, W> grads[kPairs], values[kPairs];
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      slots[u] = walk.next();
      grads[u] = load_slot(dy, slots[u]);  // zero where there is no value, and so adds nothing
      values[u] = load_slot(x, slots[u]);
    }
    Sums<A> batch{0, 0};
#pragma unroll
    for (int i = 0; i < kPairs * W; ++i) {
      const A grad = widen(grads[i / W].values[i % W]), value = widen(values[i / W].values[i % W]);
      batch.add(grad, grad * (value - center));
    }
    sums.add(batch.first, batch.second);
  }
  A count = 0;
  reduce_block(sums, count);
  Sums<double> total{sums.first, sums.second};
  if (!merge_parts(total, plan, walk.channel, walk.part, partials, tickets)) return;
  if (thread_index() == 0) write_sums<A>(results, plan.channels, walk.channel, total);
}

// Room for three blocks on a multiprocessor: with that of four the compiler puts off a load of a float16 batch.
template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 3)
    interleaved_backward_reduce(const T* dy, const T* x, Interleaved plan, Channels mean, Results results,
                                double2* partials, uint32_t* tickets) {
  constexpr int kPairs = kSlots<W> / 2;
  InterleavedWalk<W> walk(plan, false);
  A centers[W] = {};
#pragma unroll
  for (int w = 0; w < W; ++w) centers[w] = walk.active ? read_channel<A>(mean, walk.channel + w) : A(0);
  Sums<A> sums[W] = {};
  while (!walk.done()) {
    Pack<T, W> grads[kPairs], values[kPairs];
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      const int64_t offset = walk.next();
      grads[u] = load_at<W>(dy, offset);  // zero where there are none, and so adds nothing
      values[u] = load_at<W>(x, offset);
    }
#pragma unroll
    for (int w = 0; w < W; ++w) {
      Sums<A> batch{0, 0};
#pragma unroll
      for (int u = 0; u < kPairs; ++u) {
        const A grad = widen(grads[u].values[w]);
        batch.add(grad, grad * (widen(values[u].values[w]) - centers[w]));
      }
      sums[w].add(batch.first, batch.second);
    }
  }
  A count = 0;
  const Sums<A> sum = reduce_rows<W>(sums, count);
  Sums<double> total{sum.first, sum.second};
  if (!merge_parts(total, plan, walk.tile_begin, W, walk.part, partials, tickets)) return;
  write_sums<A>(results, plan.channels, walk.tile_begin + thread_index(), total);
}

template <typename T, int W>
const char* launch_backward_reduce(const T* dy, const T* x, const Geometry& g, Channels mean, const Results& results,
                                   Workspace& workspace, Stream stream) {
  if (g.interleaved) {
    const Interleaved plan = split_interleaved(g, W, sizeof(T), kReduction);
    const Scratch scratch(workspace, plan.parts, g.channels);
    return launch(interleaved_backward_reduce<T, W>, plan.blocks(), block_of(plan), stream, dy, x, plan, mean, results,
                  scratch.partials, scratch.tickets);
  }
  const int misaligned = misalignment<T, W>(x);
  const Planar plan = split_planar(g, W, misaligned == 0 && g.inner % W == 0, kReduction);
  if (!fits(plan, W)) return kTooLarge;
  const Scratch scratch(workspace, plan.along_batch * plan.along_inner, g.channels);
  return launch(planar_backward_reduce<T, W>, plan.blocks(), block_of(plan), stream, dy, x, plan, misaligned, mean,
                results, scratch.partials, scratch.tickets);
}

}  // namespace

const char* backward_reduce(const void* dy, const void* x, DType dtype, const Geometry& g, Channels mean,
                            Channels invstd, const GradOutputs& outputs, Workspace& workspace, Stream stream) {
  return dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    const bool vectors = takes_vectors(g, sizeof(T), {dy, x});
    return (vectors ? launch_backward_reduce<T, kVector<T>>
                    : launch_backward_reduce<T, 1>)(static_cast<const T*>(dy), static_cast<const T*>(x), g, mean,
                                                    Results{invstd, outputs}, workspace, stream);
  });
}

}  // namespace bagua_syncbn::cuda
