// Allocates tensors on the device of another tensor. Calls torch's shim directly: torch::stable::new_empty and
// empty_like take three times as long, because they look up the op by name and box its arguments.
#pragma once

#include "stable_abi.h"

namespace bagua_syncbn {

// Raises an out-of-memory error. torch's own error does not cross the stable ABI; bagua_syncbn/_errors.py parses this
// text and raises torch's error.
[[noreturn]] inline void refuse_memory(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype,
                                       const Tensor& like) {
  int64_t values = 1;
  for (const int64_t size : sizes) values *= size;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  const size_t itemsize = aoti_torch_dtype_element_size(code);
  std::ostringstream message;
  message << "memory: expected " << values << " values of " << itemsize << " bytes on " << device_name(like);
  throw std::runtime_error(message.str() + ", got none");
}

// Allocates a tensor; `sizes` and `strides` must describe a dense tensor.
inline Tensor allocate(torch::headeronly::IntHeaderOnlyArrayRef sizes, torch::headeronly::IntHeaderOnlyArrayRef strides,
                       ScalarType dtype, const Tensor& like) {
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle result = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), code,
                               device_type(like), like.get_device_index(), &result);
  if (error != AOTI_TORCH_SUCCESS) refuse_memory(sizes, dtype, like);
  return Tensor(result);
}

inline Tensor allocate_vector(int64_t count, ScalarType dtype, const Tensor& like) {
  const int64_t stride = 1;
  return allocate({&count, 1}, {&stride, 1}, dtype, like);
}

// Like empty_like for a dense tensor: keeps its strides.
inline Tensor allocate_like(const Tensor& dense) {
  return allocate(dense.sizes(), dense.strides(), scalar_type(dense), dense);
}

// Returns `function(tensor)`, a torch function that allocates a tensor like `tensor`.
template <typename Function>
Tensor allocate_by(const Function& function, const Tensor& tensor) {
  try {
    return function(tensor);
  } catch (const std::runtime_error&) {
    refuse_memory(tensor.sizes(), scalar_type(tensor), tensor);
  }
}

}  // namespace bagua_syncbn
