// batch_norm_backward_elemt: dx = ((dy - mean_dy) - (x - mean) * projection) * scale, the gradient of the input.
//
// Threads are mapped to data as in elemt.cu, with half as many slots of each of the two inputs under way. Factors come
// from the sums and the count of all ranks, which are on the device. Blocks go over the tensors from their end, since
// backward_reduce went from their beginning.

#include "factors.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_backward_elemt(Planar plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                          BackwardElemtArguments arguments) {
  PlanarWalk<W> walk(plan, true);
  Slot<W> slots[kPairs<W>];
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    next_slots(walk, slots);
    load_pairs(walk, dy, x, slots, grads, values);
  };
  bool more = !walk.done();
  load();
  GradientFactors<A> factors[1];  // waited for together with the first batch
  gradient_factors(factors, walk, plan.channels, arguments);
  while (more) {
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        values[u].values[j] = narrow<T>(factors[0].gradient(widen(grads[u].values[j]), widen(values[u].values[j])));
      }
      store_slot(dx, slots[u], values[u]);
    }
    more = !walk.done();
    load();
  }
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 3)
    interleaved_backward_elemt(Interleaved plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                               BackwardElemtArguments arguments) {
  InterleavedWalk<W> walk(plan, true);
  int64_t offsets[kPairs<W>];
  Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
  const auto load = [&] {
    next_offsets(walk, offsets);
    load_offsets(dy, offsets, grads);
    load_offsets(x, offsets, values);
  };
  bool more = !walk.done();
  load();
  GradientFactors<A> factors[W];  // waited for together with the first batch
  gradient_factors(factors, walk, plan.channels, arguments);
  while (more) {
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
      if (offsets[u] < 0) break;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        values[u].values[w] = narrow<T>(factors[w].gradient(widen(grads[u].values[w]), widen(values[u].values[w])));
      }
      store_pack(dx + offsets[u], values[u]);
    }
    more = !walk.done();
    load();
  }
}

template <typename T, int W>
struct BackwardElemt {
  static constexpr auto planar = planar_backward_elemt<T, W>;
  static constexpr auto interleaved = interleaved_backward_elemt<T, W>;
};

}  // namespace

const char* backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                           const BackwardElemtArguments& arguments, Stream stream) {
  return launch_elementwise<BackwardElemt>(dtype, g, {dy, x, dx}, stream, In{dy}, In{x}, Out{dx}, arguments);
}

}  // namespace bagua_syncbn::cuda
