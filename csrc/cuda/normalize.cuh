// Normalization and activations: z = (x - mean) * invstd * weight + bias + residual, act(z) and act'(z).
//
// One kernel per dtype, width and layout computes all activations: it branches once per slot, after all loads of a
// batch. One kernel per activation would be as fast but take ten times the machine code.
#pragma once

#include "../activations.h"
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

// Adds the factors of the gradient.
template <typename A>
struct GradientFactors : NormalizeFactors<A> {
  A mean_dy, projection;

  GradientFactors() = default;
  __device__ __forceinline__ GradientFactors(const BackwardElemtArguments& arguments, int64_t channels, int64_t c) {
    const A* const sums = static_cast<const A*>(arguments.sums);
    const A sum_dy = sums[c], sum_dy_xmu = sums[channels + c];
    const ChannelValue invstd_(arguments.factors.invstd, c);
    static_cast<NormalizeFactors<A>&>(*this) = {arguments.factors, c};
    const A inverse_count = A(1) / static_cast<A>(*arguments.count), invstd = invstd_.as<A>();
    mean_dy = sum_dy * inverse_count;
    projection = sum_dy_xmu * inverse_count * invstd * invstd;
  }
  __device__ __forceinline__ A gradient(A dy, A x) const {
    return ((dy - mean_dy) - (x - this->mean) * projection) * this->scale;
  }
};

// Sets the factors of a thread's channels. One thread of the block per channel calls read(channel): code that branches
// on the dtype of each tensor for several channels would not fit the instruction caches. Called by all threads.
template <typename Traits, typename F, typename Read>
__device__ __forceinline__ void share_factors(F (&factors)[Traits::kLanes], const Batch<Traits>& batch,
                                              const Read& read) {
  __shared__ F tile[Traits::kTile];
  const int64_t own = batch.walk.own_channel();
  if (own >= 0) tile[thread_index()] = read(own);
  __syncthreads();
  if (!batch.any) return;  // threads may have no channels
#pragma unroll
  for (int i = 0; i < Traits::kLanes; ++i) factors[i] = tile[batch.walk.column() * Traits::kLanes + i];
}

namespace activations {

template <typename V>
__device__ __forceinline__ V of(double constant) {
  return static_cast<V>(constant);
}
template <typename V>
__device__ __forceinline__ V exp_of(V x) {
  return exp(x);
}
template <typename V>
__device__ __forceinline__ V expm1_of(V x) {
  return expm1(x);
}
template <typename V>
__device__ __forceinline__ V tanh_of(V x) {
  return tanh(x);
}
template <typename V>
__device__ __forceinline__ V normal_cdf(V z) {
  return of<V>(0.5) * erfc(z * of<V>(-0.7071067811865476));
}
__device__ __forceinline__ double sigmoid_of(double x) {
  return 1.0 / (1.0 + exp(-x));
}
// Rounded to nearest: the derivative of GeluTanh multiplies errors near 1 by z^3.
__device__ __forceinline__ float sigmoid_of(float x) {
  return __frcp_rn(1.0f + expf(-x));
}

BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_ACTIVATION)

}  // namespace activations

// Replaces each z with act(z) or act'(z). In float64 one value at a time, which needs fewer registers.
template <bool kDerivative, typename A, int N>
__device__ __forceinline__ void activate(A (&z)[N], int64_t activation, A parameter) {
  constexpr int kAtOnce = sizeof(A) == 8 ? 1 : N;
#pragma unroll
  for (int first = 0; first < N; first += kAtOnce) {
    switch (static_cast<Code>(activation)) {
#define BAGUA_SYNCBN_CASE(name, ...)                                                  \
  case Code::k##name:                                                                 \
    _Pragma("unroll") for (int i = first; i < first + kAtOnce; ++i) {                 \
      z[i] = kDerivative ? activations::name::template derivative<A>(z[i], parameter) \
                         : activations::name::template value<A>(z[i], parameter);     \
    }                                                                                 \
    break;
      BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
    }
  }
}

// Sets `z` to the normalized values of a slot.
template <typename F, int kLanes, typename T, int W, typename A>
__device__ __forceinline__ void normalize(const F (&factors)[kLanes], const Pack<T, W>& x, A (&z)[W]) {
#pragma unroll
  for (int w = 0; w < W; ++w) z[w] = factors[w % kLanes].normalize(widen(x.values[w]));
}
// Adds the residual.
template <typename T, int W, typename A>
__device__ __forceinline__ void add(const Pack<T, W>& residual, A (&z)[W]) {
#pragma unroll
  for (int w = 0; w < W; ++w) z[w] += widen(residual.values[w]);
}

}  // namespace bagua_syncbn::cuda
