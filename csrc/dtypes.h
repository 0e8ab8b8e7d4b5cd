// The float dtypes that tensors can have: the one list of them, and the type in which their values are computed.
//
// A new dtype is a line here, its name in kDTypeNames, and its storage below; widen and narrow in cpu/loops/vectors.inl
// and cuda/values.cuh; and _INPUT_DTYPES in bagua_syncbn/checks.py. One that ATen's batch normalization does not take
// is refused in _torch_takes in functional.py and _takes in ops/aten.py. One of a byte takes its size in allocate.h,
// too, and vectors of 8 bytes in cuda/values.cuh and cuda/walk.cuh: of 16 values a batch has more than the 32 bits in
// which kernels note which of them count, and threads more than their registers hold.
#pragma once

#include <cstdint>
#include <type_traits>

// DO(name in torch's ScalarType, type of a stored value in torch, in the loops of cpu/loops.h, in CUDA)
#define BAGUA_SYNCBN_DTYPES(DO)                                          \
  DO(Half, torch::headeronly::Half, HalfBits, __half)                    \
  DO(BFloat16, torch::headeronly::BFloat16, BFloat16Bits, __nv_bfloat16) \
  DO(Float, float, float, float)                                         \
  DO(Double, double, double, double)

namespace bagua_syncbn {

// Storage of half-precision values on CPU, without arithmetic.
struct HalfBits {
  uint16_t bits;
};
struct BFloat16Bits {
  uint16_t bits;
};

constexpr const char* kDTypeNames = "float16, bfloat16, float32 or float64";

enum class DType : int32_t {
#define BAGUA_SYNCBN_NAME(name, ...) k##name,
  BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_NAME)
#undef BAGUA_SYNCBN_NAME
};

// The type in which values of type T are computed: double for double, float for any other.
template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace bagua_syncbn
