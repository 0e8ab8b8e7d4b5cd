// Allocates results on the device of another tensor. Calls torch's shim directly, because torch::stable::new_empty and
// empty_like look up the op by name and box its arguments in each call, which takes three times as long.
#pragma once

#include "stable_abi.h"

namespace bagua_syncbn {

// Raises an out-of-memory error. torch's own error does not cross the stable ABI; bagua_syncbn/errors.py parses
// this text and makes torch raise it again.
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

// `strides` must be those of a dense tensor.
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

// Returns a row-major copy.
inline Tensor contiguous_copy(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * sizes[dim];
  Tensor copy = allocate(sizes, {strides.data(), strides.size()}, scalar_type(tensor), tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// Like empty_like for any strides.
inline Tensor allocate_as_torch(const Tensor& tensor) {
  try {
    return torch::stable::empty_like(tensor);
  } catch (const std::runtime_error&) {
    refuse_memory(tensor.sizes(), scalar_type(tensor), tensor);
  }
}

}  // namespace bagua_syncbn
