// Activations: act(z) and act'(z), where z = (x - mean) * invstd * weight + bias + residual.
//
// One kernel per dtype, width and layout computes all activations: it branches once per slot, after all loads of a
// batch. A kernel per activation would be as fast but need ten times the machine code.
#pragma once

#include "../activations.h"
#include "factors.cuh"

namespace bagua_syncbn::cuda {

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
__device__ __forceinline__ V exp_between(V x) {
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
// Exact to 2 units in the last place; a division takes three times the instructions.
__device__ __forceinline__ float sigmoid_of(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));
}
template <typename V>
__device__ __forceinline__ V times_sigmoid(V a, V x) {
  return a * sigmoid_of(x);
}
template <typename V>
__device__ __forceinline__ V sigmoid_slope(V x) {
  return sigmoid_of(x) * sigmoid_of(-x);
}

#define BAGUA_SYNCBN_FORMULAS
#include "../activations.h"

}  // namespace activations

// Replaces each z by act(z), or by act'(z).
template <bool kDerivative, typename A, int N>
__device__ __forceinline__ void activate(A (&z)[N], const Act<A>& act) {
  switch (static_cast<Code>(act.code)) {
#define BAGUA_SYNCBN_CASE(name)                                                           \
  case Code::k##name:                                                                     \
    _Pragma("unroll") for (int i = 0; i < N; ++i) {                                       \
      z[i] = kDerivative ? activations::name::template derivative<A>(z[i], act.parameter) \
                         : activations::name::template value<A>(z[i], act.parameter);     \
    }                                                                                     \
    break;
    BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
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
