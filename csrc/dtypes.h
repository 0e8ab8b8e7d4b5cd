// The supported float dtypes.
//
// To add a dtype: add a line here, its name in kDTypeNames, conversions in cpu/loops/vectors.inl, and a line in DTYPES
// (bagua_syncbn/_ops/definition.py), in the same order.
#pragma once

#include <cstdint>
#include <type_traits>

// DO(name in torch's ScalarType, type in torch, type in CUDA)
#define BAGUA_SYNCBN_DTYPES(DO)                            \
  DO(Half, torch::headeronly::Half, __half)                \
  DO(BFloat16, torch::headeronly::BFloat16, __nv_bfloat16) \
  DO(Float, float, float)                                  \
  DO(Double, double, double)

namespace bagua_syncbn {

constexpr const char* kDTypeNames = "float16, bfloat16, float32 or float64";

enum class DType : int32_t {
#define BAGUA_SYNCBN_NAME(name, ...) k##name,
  BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_NAME)
#undef BAGUA_SYNCBN_NAME
};

// The accumulate type for values of type T: double for double, else float.
template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace bagua_syncbn
