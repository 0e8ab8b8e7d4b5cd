// Demands of each op on its arguments, whatever the device. All of it is checked before anything is computed, so that
// an op that raises has written to nothing.
#pragma once

#include <initializer_list>
#include <string>

#include "activations.h"
#include "layout.h"
#include "packed_stats.h"
#include "stable_abi.h"

namespace bagua_syncbn {

// An argument, which may be None, and its name.
struct Named {
  const char* name;
  const Tensor* tensor;
  Named(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  Named(const char* name, const OptionalTensor& tensor) : name(name), tensor(tensor ? &*tensor : nullptr) {}
};

// (2, 3, 4)
inline std::string sizes_of(const Tensor& tensor) {
  std::string sizes = "(";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return sizes + ")";
}

// Compares torch's codes; Tensor::device() would look up first what they stand for.
inline void check_device(const Tensor& tensor, const char* name, const Tensor& other) {
  const bool same = device_type(tensor) == device_type(other) && tensor.get_device_index() == other.get_device_index();
  if (!same)
    refuse(name, "it on the device of the other arguments", device_name(tensor), " beside ", device_name(other));
}

// (N, C, *)
inline void check_input(const Tensor& input) {
  const bool valid = input.dim() >= 2;
  check(valid, "input", "at least 2 dimensions, (N, C, *)", input.dim());
  dtype_of(input, "input");
}

inline void check_like_input(std::initializer_list<Named> arguments, const Tensor& input) {
  for (const auto& [name, tensor] : arguments) {
    if (tensor == nullptr) continue;
    bool same = tensor->dim() == input.dim();
    for (int64_t dim = 0; same && dim < input.dim(); ++dim) same = tensor->size(dim) == input.size(dim);
    if (!same) refuse(name, "the sizes of input", sizes_of(*tensor), " for ", sizes_of(input));
    const ScalarType dtype = scalar_type(*tensor), expected = scalar_type(input);
    if (dtype != expected) refuse(name, "the dtype of input", dtype, " for ", expected);
    check_device(*tensor, name, input);
  }
}

// One value of any float dtype for each channel, on the device of `other`.
inline void check_channels(std::initializer_list<Named> arguments, int64_t channels, const Tensor& other) {
  for (const auto& [name, tensor] : arguments) {
    if (tensor == nullptr) continue;
    if (tensor->numel() != channels) refuse(name, "one element for each channel", tensor->numel(), " for ", channels);
    check_device(*tensor, name, other);
    dtype_of(*tensor, name);
  }
}

inline void check_activation(int64_t activation) {
  check(activation >= 0 && activation < kActivations, "activation", "the code of one", activation);
}

inline void check_counter(const Tensor& tensor, const char* name, const Tensor& other) {
  const bool counts = scalar_type(tensor) == ScalarType::Long && tensor.numel() == 1;
  if (!counts) refuse(name, "an int64 scalar", scalar_type(tensor), " ", sizes_of(tensor));
  check_device(tensor, name, other);
}

inline void check_fault(const OptionalTensor& fault) {
  if (!fault) return;
  const bool records = scalar_type(*fault) == ScalarType::Long && fault->numel() == 8 && fault->is_contiguous() &&
                       device_type(*fault) == aoti_torch_device_type_cpu();
  if (!records) refuse("fault", "8 int64 values in the memory of the host", scalar_type(*fault), " ", sizes_of(*fault));
}

// Null if there is none.
inline int64_t* record_of(const OptionalTensor& fault) {
  return fault ? static_cast<int64_t*>(fault->mutable_data_ptr()) : nullptr;
}

// Words at the end of a row of statistics, if there is a `caller`: layer and options, of 24 bits each, and the call.
inline Words words_of_row(std::optional<int64_t> caller, int64_t call) {
  if (!caller) return {};
  check(*caller >= 0 && *caller < kWord * kWord, "caller", "an integer of 48 bits", *caller);
  check(call >= 0 && call < kWord, "call", "an integer of 24 bits", call);
  return {3,
          {static_cast<int32_t>(*caller / kWord), static_cast<int32_t>(*caller % kWord), static_cast<int32_t>(call)}};
}

// Words at the end of sums, if there is a `fingerprint`: each of its three parts of 12 bits, and the square of it.
inline Words words_of_sums(std::optional<int64_t> fingerprint) {
  if (!fingerprint) return {};
  check(*fingerprint >= 0 && *fingerprint < kWord << 12, "fingerprint", "an integer of 36 bits", *fingerprint);
  Words words{6, {}};
  for (int part = 0; part < 3; ++part) {
    const auto word = static_cast<int32_t>((*fingerprint >> (12 * part)) & 0xfff);
    words.values[2 * part] = word;
    words.values[2 * part + 1] = word * word;
  }
  return words;
}

// `mask`: bool, one for each position of `input` (N, C, *); or int64, lengths (N).
inline std::optional<Mask> mask_of(const OptionalTensor& positions, const Tensor& input) {
  if (!positions) return std::nullopt;
  const Tensor& mask = *positions;
  check_device(mask, "mask", input);
  int64_t inner = 1;
  for (int64_t dim = 2; dim < input.dim(); ++dim) inner *= input.size(dim);
  const int64_t batch = input.size(0), length = input.size(input.dim() - 1);
  const ScalarType dtype = scalar_type(mask);
  const void* data = mask.const_data_ptr();
  if (dtype == ScalarType::Bool && mask.numel() == batch * inner && mask.is_contiguous()) {
    return Mask{static_cast<const uint8_t*>(data), nullptr, inner, length};
  }
  if (dtype == ScalarType::Long && mask.numel() == batch && mask.is_contiguous() && input.dim() > 2) {
    return Mask{nullptr, static_cast<const int64_t*>(data), inner, length};
  }
  refuse("mask", "a contiguous bool (N, *), or int64 lengths (N) for an input (N, C, *, L)", dtype, " ",
         sizes_of(mask));
}

}  // namespace bagua_syncbn
