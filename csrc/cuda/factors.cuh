// A channel for the kernels: the factors of its values, which the threads of a block share, and the results of its
// sums.
#pragma once

#include "reduce.cuh"

namespace bagua_syncbn::cuda {

// All that sums without an activation need.
template <typename A>
struct Center {
  A mean;

  Center() = default;
  __device__ __forceinline__ Center(const Factors& factors, int64_t c) : mean(load_channel(factors.mean, c).as<A>()) {}
};

template <typename A>
struct NormalizeFactors {
  A mean, scale, shift;

  NormalizeFactors() = default;
  __device__ __forceinline__ NormalizeFactors(const Factors& factors, int64_t c) {
    const ChannelValue loaded_mean = load_channel(factors.mean, c), invstd = load_channel(factors.invstd, c);
    const ChannelValue weight = load_channel(factors.weight, c), bias = load_channel(factors.bias, c);
    mean = loaded_mean.as<A>();
    scale = invstd.as<A>() * (factors.weight.data == nullptr ? A(1) : weight.as<A>());
    shift = factors.bias.data == nullptr ? A(0) : bias.as<A>();
  }
  __device__ __forceinline__ A normalize(A value) const { return (value - mean) * scale + shift; }
};

// Whether the ranks spoke of the same, by the words that follow the sums: each pair of them is read by a thread of its
// own, and waited for together with the factors. All threads of the block must ask.
class Agreement {
 public:
  __device__ __forceinline__ Agreement(const BackwardElemtArguments& arguments, int64_t channels)
      : arguments_(arguments) {
    if (!there()) return;
    const int64_t word = 2 * (channels + thread_index());
    sum_ = load_channel(arguments.sums, word);
    squares_ = load_channel(arguments.sums, word + 1);
  }

  __device__ __forceinline__ bool holds() const {
    __shared__ bool differs[kMostWords / 2];
    if (thread_index() < kMostWords / 2)
      differs[thread_index()] = there() && !same_word(sum_.as<double>(), squares_.as<double>(), arguments_.ranks);
    __syncthreads();
    const bool same = !differs[0] && !differs[1] && !differs[2];
    if (!same && blockIdx.x == 0 && blockIdx.y == 0 && thread_index() == 0)
      record_fault<double>(arguments_.fault, {Fault::kSum, arguments_.call}, nullptr, 0, 0);
    return same;
  }

 private:
  __device__ __forceinline__ bool there() const { return 2 * thread_index() < arguments_.words; }

  const BackwardElemtArguments& arguments_;
  ChannelValue sum_, squares_;
};

// Factors of the gradient, and of z, which only an activation needs.
template <typename A>
struct GradientFactors {
  A mean, mean_dy, projection, scale, shift;

  GradientFactors() = default;
  __device__ __forceinline__ GradientFactors(const BackwardElemtArguments& arguments, int64_t channels, int64_t c) {
    const Factors& factors = arguments.factors;
    const ChannelValue loaded_mean = load_channel(factors.mean, c), loaded_invstd = load_channel(factors.invstd, c);
    const ChannelValue sum_dy = load_channel(arguments.sums, c), dy_xmu = load_channel(arguments.sums, channels + c);
    const ChannelValue weight = load_channel(factors.weight, c), bias = load_channel(factors.bias, c);
    const A inverse_count = A(1) / static_cast<A>(*arguments.count), invstd = loaded_invstd.as<A>();
    mean = loaded_mean.as<A>();
    mean_dy = sum_dy.as<A>() * inverse_count;
    projection = dy_xmu.as<A>() * inverse_count * invstd * invstd;
    scale = invstd * (factors.weight.data == nullptr ? A(1) : weight.as<A>());
    shift = factors.bias.data == nullptr ? A(0) : bias.as<A>();
  }
  __device__ __forceinline__ A gradient(A dy, A x) const { return ((dy - mean_dy) - (x - mean) * projection) * scale; }
  __device__ __forceinline__ A normalize(A value) const { return (value - mean) * scale + shift; }
};

// Interleaved: the factors of the W channels of a thread, `read(channel)` of each. One thread reads those of a channel
// for the whole block: the tensors they come from can be of any dtype, and code that decides that for each of W
// channels of each tensor is longer than all caches for instructions. All threads of the block must call this.
template <int W, typename F, typename Read>
__device__ __forceinline__ void share_factors(F (&factors)[W], const InterleavedWalk<W>& walk, const Read& read) {
  __shared__ F tile[kTileChannels<W>];
  if (walk.writes()) tile[thread_index()] = read(walk.first_channel() + thread_index());
  __syncthreads();
  if (!walk.active) return;
#pragma unroll
  for (int w = 0; w < W; ++w) factors[w] = tile[threadIdx.x * W + w];
}

// Planar: the factors of the channel of a block. One thread reads them for all, as above: other warps would read them
// once more each. All threads of the block must call this.
template <typename F, int W, typename Read>
__device__ __forceinline__ void share_factors(F (&factors)[1], const PlanarWalk<W>& walk, const Read& read) {
  __shared__ F shared;
  if (thread_index() == 0) shared = read(walk.channel);
  __syncthreads();
  factors[0] = shared;
}

template <typename A>
__device__ __forceinline__ void write_sums(const BackwardReduceArguments& arguments, int64_t channels, int64_t c,
                                           const Sums<double>& sums) {
  static_cast<A*>(arguments.sums)[c] = static_cast<A>(sums.first);
  static_cast<A*>(arguments.sums)[channels + c] = static_cast<A>(sums.second);
  if (c == 0) pack_words(static_cast<A*>(arguments.sums) + 2 * channels, arguments.words);
  write_channel(arguments.grad_bias, c, sums.first);
  write_channel(arguments.grad_weight, c, sums.second * load_channel(arguments.factors.invstd, c).as<double>());
}

}  // namespace bagua_syncbn::cuda
