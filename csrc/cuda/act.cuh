// The epilogues of a kernel that normalizes: none; or y = act(z), z = (x - mean) * invstd * weight + bias + residual.
//
// One kernel with an activation for each dtype, width and layout computes all activations: which one it is, is decided
// once for all values of a slot, after all loads of a batch. A kernel for each activation would be as fast, in ten
// times the machine code.
#pragma once

#include "../activations.h"
#include "batch.cuh"
#include "factors.cuh"

namespace bagua_syncbn::cuda {

namespace activations {

template <typename V>
__device__ __forceinline__ V of(double constant) {
  return static_cast<V>(constant);
}
__device__ __forceinline__ float exp_of(float x) {
  return expf(x);
}
__device__ __forceinline__ float exp_between(float x) {
  return expf(x);
}
__device__ __forceinline__ float expm1_of(float x) {
  return expm1f(x);
}
// To 2 units in the last place, at a third of the instructions of a division.
__device__ __forceinline__ float sigmoid_of(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));
}
__device__ __forceinline__ float tanh_of(float x) {
  return tanhf(x);
}
__device__ __forceinline__ float normal_cdf(float z) {
  return 0.5f * erfcf(z * -0.7071067811865476f);
}

__device__ __forceinline__ double exp_of(double x) {
  return exp(x);
}
__device__ __forceinline__ double exp_between(double x) {
  return exp(x);
}
__device__ __forceinline__ double expm1_of(double x) {
  return expm1(x);
}
__device__ __forceinline__ double sigmoid_of(double x) {
  return 1.0 / (1.0 + exp(-x));
}
__device__ __forceinline__ double tanh_of(double x) {
  return tanh(x);
}
__device__ __forceinline__ double normal_cdf(double z) {
  return 0.5 * erfc(z * -0.7071067811865476);
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

// Sets all of `z` to the activation there, or to its derivative.
template <bool kDerivative, typename A, int N>
__device__ __forceinline__ void activate(A (&z)[N], const Act<A>& act) {
  switch (static_cast<Code>(act.code)) {
#define BAGUA_SYNCBN_CASE(name, ...)                                                      \
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

// Policies of a kernel: what it does besides normalizing.
template <typename T>
struct Plain {
  static constexpr bool kActivates = false;
  static constexpr const T* residual = nullptr;

  template <bool kDerivative, typename A, int W>
  __device__ __forceinline__ void apply(A (&)[W]) const {}
};

template <typename T>
struct Activated {
  static constexpr bool kActivates = true;
  const T* __restrict__ residual;
  Act<Accumulate<T>> act;

  template <bool kDerivative, typename A, int W>
  __device__ __forceinline__ void apply(A (&z)[W]) const {
    activate<kDerivative>(z, act);
  }
};

// Makes either of them from what an op is given.
struct EpilogueOf {
  const Options& options;
  template <typename T>
  operator Plain<T>() const {
    return {};
  }
  template <typename T>
  operator Activated<T>() const {
    return {static_cast<const T*>(options.residual),
            {options.act.code, static_cast<Accumulate<T>>(options.act.parameter)}};
  }
};

// Sets `z` to that of a slot, without a residual; and adds one.
template <typename F, int kLanes, typename T, int W, typename A>
__device__ __forceinline__ void normalize(const F (&factors)[kLanes], const Pack<T, W>& x, A (&z)[W]) {
#pragma unroll
  for (int w = 0; w < W; ++w) z[w] = factors[w % kLanes].normalize(widen(x.values[w]));
}
template <typename T, int W, typename A>
__device__ __forceinline__ void add(const Pack<T, W>& residual, A (&z)[W]) {
#pragma unroll
  for (int w = 0; w < W; ++w) z[w] += widen(residual.values[w]);
}

}  // namespace bagua_syncbn::cuda
