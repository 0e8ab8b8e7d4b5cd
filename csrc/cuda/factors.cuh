// Per-channel factors, shared by the threads of a block.
#pragma once

#include "batch.cuh"

namespace bagua_syncbn::cuda {

// Factors of z = (x - mean) * scale + shift.
template <typename A>
struct NormalizeFactors {
  A mean, scale, shift;

  NormalizeFactors() = default;
  __device__ __forceinline__ NormalizeFactors(const Factors& factors, int64_t c) {
    const ChannelValue mean_(factors.mean, c), invstd(factors.invstd, c), weight(factors.weight, c, 1);
    const ChannelValue bias(factors.bias, c);
    mean = mean_.as<A>();
    scale = invstd.as<A>() * weight.as<A>();
    shift = bias.as<A>();
  }
  __device__ __forceinline__ A normalize(A x) const { return (x - mean) * scale + shift; }
};

// Those of the gradient too.
template <typename A>
struct GradientFactors : NormalizeFactors<A> {
  A mean_dy, projection;

  GradientFactors() = default;
  __device__ __forceinline__ GradientFactors(const BackwardElemtArguments& arguments, int64_t channels, int64_t c) {
    const ChannelValue sum_dy(arguments.sums, c), dy_xmu(arguments.sums, channels + c);
    const ChannelValue invstd_(arguments.factors.invstd, c);
    static_cast<NormalizeFactors<A>&>(*this) = {arguments.factors, c};
    const A inverse_count = A(1) / static_cast<A>(*arguments.count), invstd = invstd_.as<A>();
    mean_dy = sum_dy.as<A>() * inverse_count;
    projection = dy_xmu.as<A>() * inverse_count * invstd * invstd;
  }
  __device__ __forceinline__ A gradient(A dy, A x) const {
    return ((dy - mean_dy) - (x - this->mean) * projection) * this->scale;
  }
};

// Sets `factors` to those of the thread's channels. `read(channel)` computes them, in one thread of the block for each
// channel: the tensors can have any dtype, and code that branches on it for each of several channels of each tensor
// would not fit the instruction caches. Called by all threads.
template <typename Traits, typename F, typename Read>
__device__ __forceinline__ void share_factors(F (&factors)[Traits::kLanes], const Batch<Traits>& batch,
                                              const Read& read) {
  __shared__ F tile[Traits::kTile];
  const int64_t own = batch.walk.own_channel();
  if (own >= 0) tile[thread_index()] = read(own);
  __syncthreads();
  if (!batch.any) return;  // may have no channels either
#pragma unroll
  for (int i = 0; i < Traits::kLanes; ++i) factors[i] = tile[batch.walk.column() * Traits::kLanes + i];
}

}  // namespace bagua_syncbn::cuda
