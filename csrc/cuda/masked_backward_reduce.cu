// batch_norm_masked_backward_reduce: as backward_reduce.cu, of the positions that count.

#include "factors.cuh"
#include "mask.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_masked_backward_reduce(Planar plan, const T* dy, const T* x, Mask mask, BackwardReduceArguments arguments,
                                  Scratch scratch) {
  PlanarWalk<W> walk(plan, false);
  const int64_t end = samples_end(plan, false);
  MaskedSlots<kPairs<W>, W> at;
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    at.next(walk, end);
    load_pairs(walk, dy, x, at.slots, grads, values);
    return at.bits(mask, plan, walk.channel);
  };
  bool more = !walk.done();
  unsigned valid = load();
  const A center = read_channel<A>(arguments.mean, walk.channel);
  Sums<A> sums[1] = {};
  while (more) {
    Sums<A> batch{0, 0};
#pragma unroll
    for (int i = 0; i < kPairs<W> * W; ++i) {
      const A grad = widen(grads[i / W].values[i % W]), deviation = widen(values[i / W].values[i % W]) - center;
      if ((valid >> i & 1) != 0) batch.add(grad, grad * deviation);
    }
    sums[0].add(batch.first, batch.second);
    more = !walk.done();
    valid = load();
  }
  merge_and_write(sums, plan, walk, arguments, scratch);
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, W == 8 ? 2 : 4)
    interleaved_masked_backward_reduce(Interleaved plan, const T* dy, const T* x, Mask mask,
                                       BackwardReduceArguments arguments, Scratch scratch) {
  InterleavedWalk<W> walk(plan, false);
  MaskedRows<kPairs<W>, W> at;
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    at.next(walk);
    load_offsets(dy, at.offsets, grads);
    load_offsets(x, at.offsets, values);
    return at.bits(mask);
  };
  bool more = !walk.done();
  unsigned valid = load();
  A centers[W] = {};
  share_factors(centers, walk, [&](int64_t c) { return read_channel<A>(arguments.mean, c); });
  Sums<A> sums[W] = {};
  while (more) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
      Sums<A> batch{0, 0};
#pragma unroll
      for (int u = 0; u < kPairs<W>; ++u) {
        const A grad = widen(grads[u].values[w]), deviation = widen(values[u].values[w]) - centers[w];
        if ((valid >> u & 1) != 0) batch.add(grad, grad * deviation);
      }
      sums[w].add(batch.first, batch.second);
    }
    more = !walk.done();
    valid = load();
  }
  merge_and_write(sums, plan, walk, arguments, scratch);
}

template <typename T, int W>
struct MaskedBackwardReduce {
  static constexpr auto planar = planar_masked_backward_reduce<T, W>;
  static constexpr auto interleaved = interleaved_masked_backward_reduce<T, W>;
};

}  // namespace

const char* masked_backward_reduce(const void* dy, const void* x, DType dtype, const Geometry& g, const Mask& mask,
                                   const BackwardReduceArguments& arguments, Workspace& workspace, Stream stream) {
  return dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    return launch_reduction<MaskedBackwardReduce, T>(g, {dy, x}, workspace, stream, static_cast<const T*>(dy),
                                                     static_cast<const T*>(x), mask, arguments);
  });
}

}  // namespace bagua_syncbn::cuda
