// Memory for results, on the device of another tensor. torch::stable has new_empty and empty_like for this, but they
// look the op up by its name at each call and box its arguments, which takes three times as long as the allocation.
// These functions call torch directly.
#pragma once

#include "stable_abi.h"

namespace bagua_syncbn {

inline Tensor allocate(torch::headeronly::IntHeaderOnlyArrayRef sizes, torch::headeronly::IntHeaderOnlyArrayRef strides,
                       ScalarType dtype, const Tensor& like) {
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  code, device_type(like), like.get_device_index(), &result));
  return Tensor(result);
}

inline Tensor allocate_scalar(ScalarType dtype, const Tensor& like) {
  return allocate({}, {}, dtype, like);
}

inline Tensor allocate_vector(int64_t count, ScalarType dtype, const Tensor& like) {
  const int64_t stride = 1;
  return allocate({&count, 1}, {&stride, 1}, dtype, like);
}

// Has the strides of `dense`, whose elements are dense in memory, as empty_like gives.
inline Tensor allocate_like(const Tensor& dense) {
  return allocate(dense.sizes(), dense.strides(), scalar_type(dense), dense);
}

}  // namespace bagua_syncbn
