// Activations of fused ops, in the order of bagua_syncbn/_ops/activations.py.
#pragma once

#include <cstdint>

#include "host_device.h"

// DO(name, shared, value, derivative): expressions of z, `zero`, `one`, and the parameter p of LeakyRelu and Elu. Value
// and derivative may use s = shared. Derivatives at kinks equal torch's.
//
// Mish: tanh(log(1 + e^z)) is 1 / (s + h) with s = e^-z, g = 1 / (1 + 2 s) and h = (1 + g) / 2. This form needs few
// roundings and cannot overflow.
// clang-format off
#define BAGUA_SYNCBN_G (one / (one + of<V>(2) * s))
#define BAGUA_SYNCBN_H (of<V>(0.5) + of<V>(0.5) * BAGUA_SYNCBN_G)
#define BAGUA_SYNCBN_ACTIVATIONS(DO)                                                                                   \
  DO(Identity, z, z, one)                                                                                              \
  DO(Relu, z, z < zero ? zero : z, z > zero ? one : zero)                                                              \
  DO(Relu6, of<V>(6), z < zero ? zero : z > s ? s : z, z > zero ? (z < s ? one : zero) : zero)                         \
  DO(LeakyRelu, z, z > zero ? z : z * p, z > zero ? one : p)                                                           \
  DO(Elu, z, z > zero ? z : p * expm1_of(z), z > zero ? one : p * exp_of(z))                                           \
  DO(Silu, sigmoid_of(z), z * s, s * (one + z * (one - s)))                                                            \
  DO(Gelu, normal_cdf(z), z * s, s + z * exp_of(of<V>(-0.5) * z * z) * of<V>(0.3989422804014327))                      \
  DO(GeluTanh, sigmoid_of(z * (of<V>(1.5957691216057308) + of<V>(0.07135481627260025) * z * z)), z * s,                \
     s + z * s * (one - s) * (of<V>(1.5957691216057308) + of<V>(0.21406444881780074) * z * z))                         \
  DO(Hardswish, of<V>(3), z * (z < -s ? zero : z > s ? one : z * of<V>(1.0 / 6) + of<V>(0.5)),                         \
     z > -s ? (z < s ? z * of<V>(1.0 / 3) + of<V>(0.5) : one) : zero)                                                  \
  DO(Sigmoid, sigmoid_of(z), s, s * (one - s))                                                                         \
  DO(Tanh, tanh_of(z), s, one - s * s)                                                                                 \
  DO(Mish, exp_of(-z), z / (s + BAGUA_SYNCBN_H),                                                                       \
     (one + z * (one - BAGUA_SYNCBN_H / (s + BAGUA_SYNCBN_H)) * (one - BAGUA_SYNCBN_G * BAGUA_SYNCBN_G)) /             \
         (s + BAGUA_SYNCBN_H))
// clang-format on

// Defines an activation for scalars or vectors V. Instruction sets and CUDA each use it in a namespace that defines
// of<V>(constant), exp_of(V), expm1_of(V), sigmoid_of(V), tanh_of(V) and normal_cdf(V). exp_of may clamp its result so
// that it and its inverse are normal numbers.
#define BAGUA_SYNCBN_ACTIVATION(name, shared, value_of_z, derivative_of_z)                     \
  struct name {                                                                                \
    template <typename V>                                                                      \
    BAGUA_SYNCBN_HOST_DEVICE static V value(V z, [[maybe_unused]] V p) {                       \
      [[maybe_unused]] const V zero = of<V>(0), one = of<V>(1), s = shared;                    \
      return value_of_z;                                                                       \
    }                                                                                          \
    template <typename V>                                                                      \
    BAGUA_SYNCBN_HOST_DEVICE static V derivative([[maybe_unused]] V z, [[maybe_unused]] V p) { \
      [[maybe_unused]] const V zero = of<V>(0), one = of<V>(1), s = shared;                    \
      return derivative_of_z;                                                                  \
    }                                                                                          \
  };

namespace bagua_syncbn {

#define BAGUA_SYNCBN_CODE(name, ...) k##name,
enum class Code : int64_t { BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CODE) };
#undef BAGUA_SYNCBN_CODE

#define BAGUA_SYNCBN_COUNT(...) +1
constexpr int64_t kActivations = BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_COUNT);
#undef BAGUA_SYNCBN_COUNT

}  // namespace bagua_syncbn
