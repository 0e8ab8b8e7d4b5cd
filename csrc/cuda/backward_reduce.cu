// batch_norm_backward_reduce: sum of dy and of dy * (x - mean) of each channel, and from them the gradients of weight
// and bias of this rank.
//
// Threads are mapped to data as in stats.cu, over two tensors at once: a thread has half as many slots of each under
// way. Groups of channels (split.h) are read by the kernel for interleaved tensors. A batch is added up before it is
// added to the sums of the thread, and all levels above it are those of reduce.cuh.

#include "factors.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_backward_reduce(Planar plan, const T* dy, const T* x, BackwardReduceArguments arguments, Scratch scratch) {
  constexpr int kValues = kPairs<W> * W;
  constexpr unsigned kAll = (1u << kValues) - 1;
  PlanarWalk<W> walk(plan, false);
  Slot<W> slots[kPairs<W>];
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    const unsigned valid = next_slots(walk, slots);
    load_pairs(walk, dy, x, slots, grads, values);
    return valid;
  };
  bool more = !walk.done();
  unsigned valid = load();
  const A center = read_channel<A>(arguments.mean, walk.channel);  // waited for together with the first batch
  Sums<A> sums[1] = {};
  while (more) {
    if (valid != kAll) {
      replace_others(grads, valid, narrow<T>(0));  // which add nothing
      replace_others(values, valid, narrow<T>(0));
    }
    Sums<A> batch{0, 0};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const A grad = widen(grads[i / W].values[i % W]), deviation = widen(values[i / W].values[i % W]) - center;
      batch.add(grad, grad * deviation);
    }
    sums[0].add(batch.first, batch.second);
    more = !walk.done();
    valid = load();
  }
  merge_and_write(sums, plan, walk, arguments, scratch);
}

// Room for three blocks of half precision on a multiprocessor: with that of four the compiler puts off a load.
template <typename T, int W, typename Plan = Interleaved, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, W < 8                           ? 4
                                            : std::is_same_v<Plan, Grouped> ? 2
                                                                            : 3)
    interleaved_backward_reduce(Plan plan, const T* dy, const T* x, BackwardReduceArguments arguments,
                                Scratch scratch) {
  RowWalk<Plan, W> walk(plan, false);
  int64_t offsets[kPairs<W>];
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];  // zero where there are none, and so add nothing
  const auto load = [&] {
    next_offsets(walk, offsets);
    load_offsets(dy, offsets, grads);
    load_offsets(x, offsets, values);
  };
  bool more = !walk.done();
  load();
  A centers[W] = {};  // waited for together with the first batch
  share_factors(centers, walk, [&](int64_t c) { return read_channel<A>(arguments.mean, c); });
  Sums<A> sums[W] = {};
  while (more) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
      Sums<A> batch{0, 0};
#pragma unroll
      for (int u = 0; u < kPairs<W>; ++u) {
        const A grad = widen(grads[u].values[w]);
        batch.add(grad, grad * (widen(values[u].values[w]) - centers[w]));
      }
      sums[w].add(batch.first, batch.second);
    }
    more = !walk.done();
    load();
  }
  merge_and_write(sums, plan, walk, arguments, scratch);
}

template <typename T, int W>
struct BackwardReduce {
  static constexpr auto planar = planar_backward_reduce<T, W>;
  static constexpr auto interleaved = interleaved_backward_reduce<T, W>;
  static constexpr bool groups() { return W > 1; }
  static constexpr auto grouped() { return interleaved_backward_reduce<T, W, Grouped>; }
};

}  // namespace

const char* backward_reduce(const void* dy, const void* x, DType dtype, const Geometry& g,
                            const BackwardReduceArguments& arguments, Workspace& workspace, Stream stream) {
  return launch_reduction<BackwardReduce>(dtype, g, {dy, x}, workspace, stream, In{dy}, In{x}, arguments);
}

}  // namespace bagua_syncbn::cuda
