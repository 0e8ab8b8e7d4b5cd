// Copies tensors that have neither layout (see Geometry).
#pragma once

#include "allocate.h"
#include "arguments.h"
#include "checks.h"

namespace bagua_syncbn {

// Returns whether `tensor` is dense and row-major. If `innermost` is not 0, that dimension must be innermost instead.
inline bool is_dense(const Tensor& tensor, int64_t innermost) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  const auto follows = [&](int64_t dim) {
    const bool holds = sizes[dim] == 1 || strides[dim] == expected;
    expected *= sizes[dim];
    return holds;
  };
  if (innermost != 0 && !follows(innermost)) return false;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    if ((innermost == 0 || dim != innermost) && !follows(dim)) return false;
  }
  return true;
}

struct DenseInput {
  Tensor tensor;
  Geometry geometry;
};

// Returns `input` (N, C, *), or a copy if it has neither layout.
inline DenseInput to_dense(const Tensor& input) {
  const int64_t batch = input.size(0), channels = input.size(1);
  int64_t inner = 1;
  for (int64_t dim = 2; dim < input.dim(); ++dim) inner *= input.size(dim);
  const bool planar = is_dense(input, 0);
  if (planar || is_dense(input, 1)) return {input, {!planar || inner == 1, batch, channels, inner}};
  const auto copy = [](const Tensor& tensor) { return torch::stable::contiguous(tensor); };
  return {allocate_by(copy, input), {inner == 1, batch, channels, inner}};
}

// Returns `tensor`, which must have the sizes of `input`, or a copy in its layout.
inline Tensor with_layout_of(const DenseInput& input, const Tensor& tensor, const char* name) {
  check_like_input(tensor, name, input.tensor);
  const bool interleaved = input.geometry.interleaved && input.geometry.inner > 1;
  if (is_dense(tensor, interleaved ? 1 : 0)) return tensor;
  Tensor copy = allocate_like(input.tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

inline OptionalTensor with_layout_of(const DenseInput& input, const OptionalTensor& tensor, const char* name) {
  return tensor ? std::optional(with_layout_of(input, *tensor, name)) : std::nullopt;
}

// Returns `result`; if `input` was copied, a copy with the strides of `empty_like(input)`.
inline Tensor with_strides_of(const Tensor& result, const DenseInput& dense, const Tensor& input) {
  if (dense.tensor.get() == input.get()) return result;
  Tensor output = allocate_by([](const Tensor& like) { return torch::stable::empty_like(like); }, input);
  torch::stable::copy_(output, result);
  return output;
}

}  // namespace bagua_syncbn
