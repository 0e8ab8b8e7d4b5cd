// LibTorch's stable ABI: one binary for torch 2.10 and later. No other file includes torch headers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "dtypes.h"

namespace bagua_syncbn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Raises RuntimeError "argument: expected ..., got ...". STD_TORCH_CHECK would add the source location.
template <typename... Got>
[[noreturn]] void refuse(const char* argument, const char* expected, const Got&... got) {
  std::ostringstream message;
  message << argument << ": expected " << expected << ", got ";
  (message << ... << got);
  throw std::runtime_error(message.str());
}

template <typename Got>
inline void check(bool holds, const char* argument, const char* expected, const Got& got) {
  if (!holds) refuse(argument, expected, got);
}

// Returns tensor.scalar_type(), faster: it tests the common dtypes first. An op calls it about ten times.
inline ScalarType scalar_type(const Tensor& tensor) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  if (code == aoti_torch_dtype_float32()) return ScalarType::Float;
  if (code == aoti_torch_dtype_bfloat16()) return ScalarType::BFloat16;
  if (code == aoti_torch_dtype_float16()) return ScalarType::Half;
  return tensor.scalar_type();
}

// Returns torch's device type code.
inline int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

inline std::string device_name(const Tensor& tensor) {
  const int32_t type = device_type(tensor);
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "an unsupported device";
}

// Returns the dtype of statistics and messages for an input dtype.
inline ScalarType accumulate_type(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Returns the dtype of `tensor`. Raises if it is not supported.
inline DType dtype_of(const Tensor& tensor, const char* argument) {
  const ScalarType dtype = scalar_type(tensor);
  switch (dtype) {
#define BAGUA_SYNCBN_CASE(name, ...) \
  case ScalarType::name:             \
    return DType::k##name;
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
    default:
      refuse(argument, kDTypeNames, dtype);
  }
}

}  // namespace bagua_syncbn
