// Demands of each op on its arguments, whatever the device. All of it is checked before anything is computed, so that
// an op that raises has written to nothing.
#pragma once

#include <initializer_list>
#include <string>

#include "activations.h"
#include "mask.h"
#include "packed_stats.h"
#include "stable_abi.h"

namespace bagua_syncbn {

// An argument, which may be None, and its name.
struct Named {
  const char* name;
  const Tensor* tensor;
  Named(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  Named(const char* name, const std::optional<Tensor>& tensor) : name(name), tensor(tensor ? &*tensor : nullptr) {}
};

// Compares torch's codes; Tensor::device() would look up first what they stand for.
inline bool on_one_device(const Tensor& a, const Tensor& b) {
  return device_type(a) == device_type(b) && a.get_device_index() == b.get_device_index();
}

inline std::string device_name(const Tensor& tensor) {
  const int32_t type = device_type(tensor);
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "a device of another kind";
}

// (2, 3, 4)
inline std::string sizes_of(const Tensor& tensor) {
  std::string sizes = "(";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return sizes + ")";
}

inline void check_device(const Tensor& tensor, const char* name, const Tensor& other) {
  if (on_one_device(tensor, other)) return;
  refuse(name, "it on the device of the other arguments", device_name(tensor), " beside ", device_name(other));
}

inline void check_floating(const Tensor& tensor, const char* name) {
  dispatch_floating(scalar_type(tensor), name, [](auto) {});
}

// (N, C, *)
inline void check_input(const Tensor& input) {
  const bool valid = input.dim() >= 2;
  check(valid, "input", "at least 2 dimensions, (N, C, *)", input.dim());
  check_floating(input, "input");
}

inline void check_like_input(const Tensor& tensor, const char* name, const Tensor& input) {
  bool same = tensor.dim() == input.dim();
  for (int64_t dim = 0; same && dim < input.dim(); ++dim) same = tensor.size(dim) == input.size(dim);
  if (!same) refuse(name, "the sizes of input", sizes_of(tensor), " for ", sizes_of(input));
  const ScalarType dtype = scalar_type(tensor), expected = scalar_type(input);
  if (dtype != expected) refuse(name, "the dtype of input", dtype, " for ", expected);
  check_device(tensor, name, input);
}

// One value of any float dtype for each channel, on the device of `other`.
inline void check_channels(const Tensor& tensor, const char* name, int64_t channels, const Tensor& other) {
  if (tensor.numel() != channels) refuse(name, "one element for each channel", tensor.numel(), " for ", channels);
  check_device(tensor, name, other);
  check_floating(tensor, name);
}

inline void check_channels_of_input(std::initializer_list<Named> arguments, const Tensor& input) {
  for (const Named& argument : arguments) {
    if (argument.tensor) check_channels(*argument.tensor, argument.name, input.size(1), input);
  }
}

inline void check_counter(const Tensor& tensor, const char* name, const Tensor& other) {
  const bool counts = scalar_type(tensor) == ScalarType::Long && tensor.numel() == 1;
  if (!counts) refuse(name, "an int64 scalar", scalar_type(tensor), " ", sizes_of(tensor));
  check_device(tensor, name, other);
}

inline void check_fault(const std::optional<Tensor>& fault) {
  if (!fault) return;
  const bool records = scalar_type(*fault) == ScalarType::Long && fault->numel() == 8 && fault->is_contiguous() &&
                       device_type(*fault) == aoti_torch_device_type_cpu();
  if (!records) refuse("fault", "8 int64 values in the memory of the host", scalar_type(*fault), " ", sizes_of(*fault));
}

// Null if there is none.
inline int64_t* record_of(const std::optional<Tensor>& fault) {
  return fault ? static_cast<int64_t*>(fault->mutable_data_ptr()) : nullptr;
}

// Words at the end of a row of statistics, if there is a `speaker`: its layer and terms, of 24 bits each, and the call.
inline Words words_of_row(std::optional<int64_t> speaker, int64_t call) {
  if (!speaker) return {};
  check(*speaker >= 0 && *speaker < kWord * kWord, "speaker", "an integer of 48 bits", *speaker);
  check(call >= 0 && call < kWord, "call", "an integer of 24 bits", call);
  return {3,
          {static_cast<int32_t>(*speaker / kWord), static_cast<int32_t>(*speaker % kWord), static_cast<int32_t>(call)}};
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

inline void check_gather_stats(const Tensor& gathered, const std::optional<Tensor>& running_mean,
                               const std::optional<Tensor>& running_var,
                               const std::optional<Tensor>& num_batches_tracked, std::optional<double> momentum,
                               const std::optional<Tensor>& fault) {
  const int64_t size = gathered.dim() == 2 ? gathered.size(1) : 0, words = words_in(size);
  if (size < 2 + words) refuse("gathered", "(ranks, 2 * channels + 2), or 3 words more", sizes_of(gathered));
  const ScalarType dtype = scalar_type(gathered);
  check(dtype == accumulate_type(dtype), "gathered", "float32 or float64", dtype);
  check_fault(fault);
  if (num_batches_tracked) check_counter(*num_batches_tracked, "num_batches_tracked", gathered);
  if (!running_mean || !running_var) return;  // none are tracked
  const bool has_factor = momentum || num_batches_tracked;
  check(has_factor, "num_batches_tracked", "a tensor, because momentum is None", "None");
  const int64_t channels = packed_channels(size, words);
  check_channels(*running_mean, "running_mean", channels, gathered);
  check_channels(*running_var, "running_var", channels, gathered);
}

inline void check_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd) {
  check_input(input);
  check_channels_of_input({{"weight", weight}, {"bias", bias}, {"mean", mean}, {"invstd", invstd}}, input);
}

inline void check_backward_reduce(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                  const Tensor& invstd, const std::optional<Tensor>& weight) {
  check_input(input);
  check_like_input(grad_output, "grad_output", input);
  check_channels_of_input({{"mean", mean}, {"invstd", invstd}}, input);
  if (weight) check_floating(*weight, "weight");  // only its dtype counts
}

inline void check_backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 const std::optional<Tensor>& fault, const std::optional<Tensor>& grad_input) {
  check_input(input);
  check_like_input(grad_output, "grad_output", input);
  if (grad_input) check_like_input(*grad_input, "grad_input", input);
  check_channels_of_input({{"weight", weight}, {"mean", mean}, {"invstd", invstd}}, input);
  const int64_t words = sums.numel() - 2 * input.size(1);
  const bool fits = words >= 0 && words <= kMostWords && words % 2 == 0;
  check(fits, "sums", "two elements for each channel, and up to three pairs of words", sums.numel());
  check_fault(fault);
  check_device(sums, "sums", input);
  check_floating(sums, "sums");
  check_counter(count, "count", input);
}

// `mask`: bool, one for each position of `input` (N, C, *); or int64, lengths (N).
inline std::optional<Mask> mask_of(const std::optional<Tensor>& positions, const Tensor& input) {
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

// A mask, and an activation, for the gradient of the input.
inline std::optional<Mask> mask_without_act(const std::optional<Tensor>& mask, const Tensor& input,
                                            int64_t activation) {
  check(!mask || activation == 0, "mask", "None with an activation", "a tensor");
  return mask_of(mask, input);
}

// Arguments of an activation and a residual.
inline void check_act(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, int64_t activation) {
  check_channels_of_input({{"weight", weight}, {"bias", bias}}, input);
  if (residual) check_like_input(*residual, "residual", input);
  check(activation >= 0 && activation < kActivations, "activation", "the code of one", activation);
}

}  // namespace bagua_syncbn
