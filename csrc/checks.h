// Argument checks of the ops, the same for all devices. They run before any computation, so an op that raises an error
// has not written to any tensor.
#pragma once

#include <string>

#include "packed_stats.h"
#include "stable_abi.h"

namespace bagua_syncbn {

// Returns sizes as text, such as (2, 3, 4).
inline std::string sizes_of(const Tensor& tensor) {
  std::string sizes = "(";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return sizes + ")";
}

// Compares torch's device codes, which is faster than Tensor::device().
inline void check_device(const Tensor& tensor, const char* name, const Tensor& other) {
  const bool same = device_type(tensor) == device_type(other) && tensor.get_device_index() == other.get_device_index();
  if (!same) refuse(name, "all tensors on the same device", device_name(tensor), " and ", device_name(other));
}

// Returns the dtype of `input`.
inline DType check_input(const Tensor& input) {
  const bool valid = input.dim() >= 2 && input.size(1) > 0;
  if (!valid) refuse("input", "at least 2 dimensions and 1 channel, (N, C, *)", sizes_of(input));
  return dtype_of(input, "input");
}

inline void check_like_input(const Tensor& tensor, const char* name, const Tensor& input) {
  bool same = tensor.dim() == input.dim();
  for (int64_t dim = 0; same && dim < input.dim(); ++dim) same = tensor.size(dim) == input.size(dim);
  if (!same) refuse(name, "the sizes of input", sizes_of(tensor), " for ", sizes_of(input));
  const ScalarType dtype = scalar_type(tensor), expected = scalar_type(input);
  if (dtype != expected) refuse(name, "the dtype of input", dtype, " for ", expected);
  check_device(tensor, name, input);
}

// Returns the dtype of a per-channel tensor on the device of `other`.
inline DType check_channels(const Tensor& tensor, const char* name, int64_t channels, const Tensor& other) {
  if (tensor.numel() != channels) refuse(name, "one element for each channel", tensor.numel(), " for ", channels);
  check_device(tensor, name, other);
  return dtype_of(tensor, name);
}

inline void check_counter(const Tensor& tensor, const char* name, const Tensor& other) {
  const bool counts = scalar_type(tensor) == ScalarType::Long && tensor.numel() == 1;
  if (!counts) refuse(name, "an int64 scalar", scalar_type(tensor), " ", sizes_of(tensor));
  check_device(tensor, name, other);
}

// Returns the fault record: 8 int64 values in host memory. Null for None.
inline int64_t* fault_record(const OptionalTensor& fault) {
  if (!fault) return nullptr;
  const bool valid = scalar_type(*fault) == ScalarType::Long && fault->numel() == 8 && fault->is_contiguous() &&
                     device_type(*fault) == aoti_torch_device_type_cpu();
  if (!valid) refuse("fault", "8 int64 values in host memory", scalar_type(*fault), " ", sizes_of(*fault));
  return static_cast<int64_t*>(fault->mutable_data_ptr());
}

// Returns a row's header: the 24-bit halves of `identity` (layer, options), and `message_number`; empty for None.
inline Header row_header(std::optional<int64_t> identity, int64_t message_number) {
  if (!identity) return {};
  return {kRowHeader,
          {static_cast<int32_t>(*identity / kWord), static_cast<int32_t>(*identity % kWord),
           static_cast<int32_t>(message_number)}};
}

// Returns the header of sums: three 12-bit parts of `fingerprint`, each followed by its square. Empty for None.
inline Header sums_header(std::optional<int64_t> fingerprint) {
  if (!fingerprint) return {};
  Header header{kSumsHeader, {}};
  for (int64_t w = 0; w < kSumsHeader; w += 2) {
    const auto part = static_cast<int32_t>((*fingerprint >> (6 * w)) & kMaxPart);
    header.words[w] = part;
    header.words[w + 1] = part * part;
  }
  return header;
}

// Returns the bytes of `mask` (N, *) with `rows` positions: 0 if invalid. Null for None.
inline const uint8_t* valid_positions(const OptionalTensor& mask, int64_t rows, const Tensor& input) {
  if (!mask) return nullptr;
  check_device(*mask, "mask", input);
  const bool fits = scalar_type(*mask) == ScalarType::Bool && mask->numel() == rows && mask->is_contiguous();
  if (!fits) refuse("mask", "a contiguous bool (N, *)", scalar_type(*mask), " ", sizes_of(*mask));
  return static_cast<const uint8_t*>(mask->const_data_ptr());
}

}  // namespace bagua_syncbn
