// The activations of fused ops, in the order of bagua_syncbn/ops/activations.py, where their codes come from.
#pragma once

#include <cstdint>

#define BAGUA_SYNCBN_ACTIVATIONS(DO) \
  DO(Identity)                       \
  DO(Relu)                           \
  DO(Relu6)                          \
  DO(LeakyRelu)                      \
  DO(Elu)                            \
  DO(Silu)                           \
  DO(Gelu)                           \
  DO(GeluTanh)                       \
  DO(Hardswish)                      \
  DO(Sigmoid)                        \
  DO(Tanh)

namespace bagua_syncbn {

#define BAGUA_SYNCBN_ONE(name) +1
constexpr int64_t kActivations = 0 BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_ONE);
#undef BAGUA_SYNCBN_ONE

// An activation of this code. The parameter is that of leaky_relu and elu, and unused in all others.
template <typename A>
struct Act {
  int64_t code;
  A parameter;
};

}  // namespace bagua_syncbn
