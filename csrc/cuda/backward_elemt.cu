// batch_norm_backward_elemt: dx = ((dy - mean_dy) - (x - mean) * projection) * scale, the gradient of the input.
//
// Threads are mapped to data as in elemt.cu, with half as many slots of each of the two inputs under way. Factors come
// from the sums and the count of all ranks, which are on the device. Blocks go over the tensors from their end, since
// backward_reduce went from their beginning.

#include "launch.cuh"
#include "walk.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename A>
struct GradientFactors {
  A mean, mean_dy, projection, scale;

  GradientFactors() = default;
  __device__ __forceinline__ GradientFactors(const BackwardElemtArguments& arguments, int64_t channels, int64_t c,
                                             A inverse_count) {
    const A invstd = read_channel<A>(arguments.invstd, c);
    mean = read_channel<A>(arguments.mean, c);
    mean_dy = read_channel<A>(arguments.sums, c) * inverse_count;
    projection = read_channel<A>(arguments.sums, channels + c) * inverse_count * invstd * invstd;
    scale = invstd * read_channel<A>(arguments.weight, c, A(1));
  }
  __device__ __forceinline__ A gradient(A dy, A x) const { return ((dy - mean_dy) - (x - mean) * projection) * scale; }
};

template <typename A>
__device__ __forceinline__ A inverse_of(const int64_t* count) {
  return A(1) / static_cast<A>(*count);
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_backward_elemt(Planar plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                          BackwardElemtArguments arguments) {
  PlanarWalk<W> walk(plan, true);
  const GradientFactors<A> factors(arguments, plan.channels, walk.channel, inverse_of<A>(arguments.count));
  while (!walk.done()) {
    Slot<W> slots[kPairs<W>];
    Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
    load_pairs(walk, dy, x, slots, grads, values);
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        values[u].values[j] = narrow<T>(factors.gradient(widen(grads[u].values[j]), widen(values[u].values[j])));
      }
      store_slot(dx, slots[u], values[u]);
    }
  }
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    interleaved_backward_elemt(Interleaved plan, const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                               BackwardElemtArguments arguments) {
  InterleavedWalk<W> walk(plan, true);
  GradientFactors<A> factors[W];
  share_factors(factors, walk, plan.channels, [&](int64_t c) {
    return GradientFactors<A>(arguments, plan.channels, c, inverse_of<A>(arguments.count));
  });
  while (!walk.done()) {
    int64_t offsets[kPairs<W>];
    Pack<T, W> grads[kPairs<W>], values[kPairs<W>];
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
      offsets[u] = walk.next();
      if (offsets[u] < 0) continue;
      grads[u] = load_pack<W>(dy + offsets[u]);
      values[u] = load_pack<W>(x + offsets[u]);
    }
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) {
      if (offsets[u] < 0) break;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        values[u].values[w] = narrow<T>(factors[w].gradient(widen(grads[u].values[w]), widen(values[u].values[w])));
      }
      store_pack(dx + offsets[u], values[u]);
    }
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
  return dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    return launch_elementwise<BackwardElemt, T>(g, {dy, x, dx}, stream, static_cast<const T*>(dy),
                                                static_cast<const T*>(x), static_cast<T*>(dx), arguments);
  });
}

}  // namespace bagua_syncbn::cuda
