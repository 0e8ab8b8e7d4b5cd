// What the kernels read and write of a channel: the factors of its values, and the results of its sums.
#pragma once

#include "reduce.cuh"

namespace bagua_syncbn::cuda {

template <typename A>
struct NormalizeFactors {
  A mean, scale, shift;

  NormalizeFactors() = default;
  __device__ __forceinline__ NormalizeFactors(const ElemtArguments& arguments, int64_t c) {
    const ChannelValue loaded_mean = load_channel(arguments.mean, c), invstd = load_channel(arguments.invstd, c);
    const ChannelValue weight = load_channel(arguments.weight, c), bias = load_channel(arguments.bias, c);
    mean = loaded_mean.as<A>();
    scale = invstd.as<A>() * (arguments.weight.data == nullptr ? A(1) : weight.as<A>());
    shift = arguments.bias.data == nullptr ? A(0) : bias.as<A>();
  }
  __device__ __forceinline__ A normalize(A value) const { return (value - mean) * scale + shift; }
};

// One by the count; NaN, which no gradient survives, where the ranks did not speak of the same.
template <typename A>
__device__ __forceinline__ A inverse_count_of(const BackwardElemtArguments& arguments, int64_t channels) {
  bool same = true;
  for (int64_t w = 2 * channels; w < 2 * channels + arguments.words; w += 2) {
    const double sum = load_channel(arguments.sums, w).as<double>();
    same &= same_word(sum, load_channel(arguments.sums, w + 1).as<double>(), arguments.ranks);
  }
  if (same) return A(1) / static_cast<A>(*arguments.count);
  if (blockIdx.x == 0 && thread_index() == 0) {
    record_fault<double>(arguments.fault, {Fault::kSum, arguments.call}, nullptr, 0, 0);
  }
  return static_cast<A>(NAN);
}

template <typename A>
struct GradientFactors {
  A mean, mean_dy, projection, scale;

  GradientFactors() = default;
  __device__ __forceinline__ GradientFactors(const BackwardElemtArguments& arguments, int64_t channels, int64_t c) {
    const ChannelValue loaded_mean = load_channel(arguments.mean, c), loaded_invstd = load_channel(arguments.invstd, c);
    const ChannelValue sum_dy = load_channel(arguments.sums, c), dy_xmu = load_channel(arguments.sums, channels + c);
    const ChannelValue weight = load_channel(arguments.weight, c);
    const A inverse_count = inverse_count_of<A>(arguments, channels), invstd = loaded_invstd.as<A>();
    mean = loaded_mean.as<A>();
    mean_dy = sum_dy.as<A>() * inverse_count;
    projection = dy_xmu.as<A>() * inverse_count * invstd * invstd;
    scale = invstd * (arguments.weight.data == nullptr ? A(1) : weight.as<A>());
  }
  __device__ __forceinline__ A gradient(A dy, A x) const { return ((dy - mean_dy) - (x - mean) * projection) * scale; }
};

template <typename A>
__device__ __forceinline__ void write_sums(const BackwardReduceArguments& arguments, int64_t channels, int64_t c,
                                           const Sums<double>& sums) {
  static_cast<A*>(arguments.sums)[c] = static_cast<A>(sums.first);
  static_cast<A*>(arguments.sums)[channels + c] = static_cast<A>(sums.second);
  if (c == 0) pack_words(static_cast<A*>(arguments.sums) + 2 * channels, arguments.words);
  write_channel(arguments.grad_bias, c, sums.first);
  write_channel(arguments.grad_weight, c, sums.second * read_channel<double>(arguments.invstd, c));
}

}  // namespace bagua_syncbn::cuda
