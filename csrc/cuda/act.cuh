// What the kernels with an activation have in common: y = act(z), z = (x - mean) * invstd * weight + bias + residual.
//
// One kernel of each dtype, width and layout computes all activations: which one it is, is decided once for all values
// of a slot, after all loads of a batch. A kernel for each would be as fast, in ten times the machine code.
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

#include "../activations.inl"

#define BAGUA_SYNCBN_CODE(name) k##name,
enum Code : int64_t { BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CODE) };
#undef BAGUA_SYNCBN_CODE

}  // namespace activations

// As an argument of a kernel.
struct ActOf {
  const Act<double>& act;
  template <typename A>
  operator Act<A>() const {
    return {act.code, static_cast<A>(act.parameter)};
  }
};

// Sets all of `z` to the activation there, or to its derivative.
template <bool kDerivative, typename A, int N>
__device__ __forceinline__ void activate(A (&z)[N], const Act<A>& act) {
  switch (act.code) {
#define BAGUA_SYNCBN_CASE(name)                                                           \
  case activations::k##name:                                                              \
    _Pragma("unroll") for (int i = 0; i < N; ++i) {                                       \
      z[i] = kDerivative ? activations::name::template derivative<A>(z[i], act.parameter) \
                         : activations::name::template value<A>(z[i], act.parameter);     \
    }                                                                                     \
    break;
    BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
}

// The first of `items`; the rest moves up. With an index that is known only when a kernel runs, an array would have to
// lie in local memory.
template <typename V, int K>
__device__ __forceinline__ V take(V (&items)[K]) {
  const V first = items[0];
#pragma unroll
  for (int k = 1; k < K; ++k) items[k - 1] = items[k];
  return first;
}

// What a batch has of a tensor, as it was loaded.
template <typename T, int W>
struct Loaded {
  Bits<T, W> bits[kPairs<W>];

  template <typename Plan>
  __device__ __forceinline__ void load(const T* tensor, const Batch<Plan, W, kPairs<W>>& batch) {
#pragma unroll
    for (int u = 0; u < kPairs<W>; ++u) bits[u] = load_slot(tensor, batch.slots[u], whole(batch.walk));
  }
  __device__ __forceinline__ Pack<T, W> take_slot() {
    const Bits<T, W> taken = take(bits);
    Pack<T, W> pack;
    memcpy(&pack, &taken, sizeof(pack));
    return pack;
  }
};

// z of a slot, without a residual; and with one.
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

template <typename T, typename A, int W>
__device__ __forceinline__ Pack<T, W> narrow_all(const A (&values)[W]) {
  Pack<T, W> pack;
#pragma unroll
  for (int w = 0; w < W; ++w) pack.values[w] = narrow<T>(values[w]);
  return pack;
}

}  // namespace bagua_syncbn::cuda
