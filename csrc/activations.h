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

#define BAGUA_SYNCBN_CODE(name) k##name,
enum class Code : int64_t { BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CODE) };
#undef BAGUA_SYNCBN_CODE

// Whether it is a few operations, which take less time than memory: then CPUs compute it anew and do not store it. As
// in bagua_syncbn/ops/activations.py.
constexpr bool is_cheap(int64_t code) {
  const auto c = static_cast<Code>(code);
  return c == Code::kRelu || c == Code::kRelu6 || c == Code::kLeakyRelu || c == Code::kHardswish;
}

// An activation of this code. The parameter is that of leaky_relu and elu, and unused in all others.
template <typename A>
struct Act {
  int64_t code;
  A parameter;
};

}  // namespace bagua_syncbn
