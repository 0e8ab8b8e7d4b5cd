// The ops as torch calls them, for CPU and CUDA. They check arguments, make them dense, allocate results and call the
// kernels of `Device` (cpu/kernels.h, cuda/kernels.h).
#pragma once

#include <tuple>

#include "arguments.h"
#include "checks.h"
#include "geometry.h"

namespace bagua_syncbn {

inline const void* data_of(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

inline PerChannel per_channel_of(const OptionalTensor& tensor) {
  return tensor ? PerChannel{tensor->const_data_ptr(), dtype_of(*tensor, "tensor")} : PerChannel{};
}

inline MutablePerChannel mutable_per_channel_of(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), dtype_of(tensor, "tensor")};
}

inline Tensor to_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline OptionalTensor to_contiguous(const OptionalTensor& tensor) {
  return tensor ? std::optional(to_contiguous(*tensor)) : std::nullopt;
}

// The tensors that Factors refers to, made contiguous.
class FactorTensors {
 public:
  FactorTensors(const Tensor& mean, const Tensor& invstd, const OptionalTensor& weight, const OptionalTensor& bias)
      : mean_(to_contiguous(mean)),
        invstd_(to_contiguous(invstd)),
        weight_(to_contiguous(weight)),
        bias_(to_contiguous(bias)) {}

  operator Factors() const {
    return {per_channel_of(mean_), per_channel_of(invstd_), per_channel_of(weight_), per_channel_of(bias_)};
  }

 private:
  const Tensor mean_, invstd_;
  const OptionalTensor weight_, bias_;
};

template <typename Device>
Tensor batch_norm_stats(const Tensor& input, std::optional<int64_t> caller, int64_t call, const OptionalTensor& mask,
                        bool uses_sums) {
  check_input(input);
  const Header header = uses_sums ? sums_header(caller.value_or(0)) : row_header(caller, call);
  const DenseInput dense = to_dense(input);
  const Geometry& g = dense.geometry;
  const uint8_t* valid = valid_positions(mask, g.rows(), input);
  const int64_t size = uses_sums ? sums_size_of(g.channels) : row_size_of(g.channels, header.size);
  const ScalarType dtype = uses_sums ? ScalarType::Double : accumulate_type(scalar_type(input));
  Tensor packed = allocate_vector(size, dtype, input);
  Device device(input);
  stats(dense.tensor.const_data_ptr(), dtype_of(input, "input"), g, valid, packed.mutable_data_ptr(), header, device);
  return packed;
}

// True while this thread recomputes a forward: its first run has updated the running statistics.
inline thread_local bool holds_buffers = false;

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> batch_norm_gather_stats(const Tensor& gathered, const OptionalTensor& running_mean,
                                                           const OptionalTensor& running_var,
                                                           const OptionalTensor& num_batches_tracked,
                                                           std::optional<double> momentum, double eps,
                                                           const OptionalTensor& fault, bool skip_nonfinite,
                                                           int64_t ranks, int64_t call) {
  const bool is_sum = gathered.dim() == 1;
  const int64_t size = is_sum || gathered.dim() == 2 ? gathered.size(-1) : 0;
  const int64_t header_size = is_sum ? kSumsHeader : header_size_of(size);
  const int64_t rest = size - (is_sum ? sums_size_of(0) : row_size_of(0, header_size)), channels = rest / 2;
  if (rest < 0 || rest % 2 != 0)
    refuse("gathered", "(ranks, 2 * channels + 2 or 5), or 2 * channels + 7 values", sizes_of(gathered));
  const ScalarType given = scalar_type(gathered), dtype = is_sum ? ScalarType::Float : given;
  check(given == (is_sum ? ScalarType::Double : accumulate_type(given)), "gathered",
        is_sum ? "float64 for a sum" : "float32 or float64", given);
  int64_t* record = fault_record(fault);
  if (num_batches_tracked) check_counter(*num_batches_tracked, "num_batches_tracked", gathered);
  const bool tracks = running_mean && running_var, has_factor = momentum || num_batches_tracked;
  if (tracks) {
    check(has_factor, "num_batches_tracked", "a tensor, because momentum is None", "None");
    check_channels({{"running_mean", running_mean}, {"running_var", running_var}}, channels, gathered);
    const bool dense = running_mean->is_contiguous() && running_var->is_contiguous();
    check(dense, "running_mean, running_var", "contiguous tensors", "strided ones");
  }
  const bool moves = tracks && !holds_buffers, counts = num_batches_tracked && !holds_buffers;
  void* batches = counts ? num_batches_tracked->mutable_data_ptr() : nullptr;
  const Tensor rows = to_contiguous(gathered);
  Tensor mean = allocate_vector(channels, dtype, gathered);
  Tensor invstd = allocate_vector(channels, dtype, gathered);
  Tensor count = allocate({}, {}, ScalarType::Long, gathered);
  Device device(gathered);
  gather_stats(GatherArguments{rows.const_data_ptr(), is_sum ? ranks : gathered.size(0), channels,
                               dtype_of(mean, "mean"), mean.mutable_data_ptr(), invstd.mutable_data_ptr(),
                               static_cast<int64_t*>(count.mutable_data_ptr()),
                               moves ? mutable_per_channel_of(*running_mean) : MutablePerChannel{},
                               moves ? mutable_per_channel_of(*running_var) : MutablePerChannel{},
                               static_cast<int64_t*>(batches), moves && !momentum, momentum.value_or(0), eps,
                               header_size, skip_nonfinite, record, is_sum, call},
               device);
  return {mean, invstd, count};
}

template <typename Device>
Tensor batch_norm_elemt(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& invstd, const OptionalTensor& residual, int64_t activation,
                        double parameter) {
  check_input(input);
  check_channels({{"weight", weight}, {"bias", bias}, {"mean", mean}, {"invstd", invstd}}, input.size(1), input);
  check_like_input({{"residual", residual}}, input);
  check_activation(activation);
  const DenseInput dense = to_dense(input);
  const OptionalTensor added = with_layout_of(residual, dense);
  Tensor output = allocate_like(dense.tensor);
  if (input.numel() > 0) {
    const FactorTensors factors{mean, invstd, weight, bias};
    Device device(input);
    elemt(dense.tensor.const_data_ptr(), output.mutable_data_ptr(), dtype_of(input, "input"), dense.geometry, factors,
          Epilogue{data_of(added), {activation, parameter}}, device);
  }
  return with_strides_of(output, dense, input);
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, std::optional<int64_t> fingerprint, const OptionalTensor& bias,
    const OptionalTensor& residual, int64_t activation, double parameter, OptionalTensor grad) {
  check_input(input);
  check_like_input({{"grad_output", grad_output}, {"residual", residual}, {"grad", grad}}, input);
  check_channels({{"mean", mean}, {"invstd", invstd}, {"weight", weight}, {"bias", bias}}, input.size(1), input);
  check_activation(activation);
  const Header header = sums_header(fingerprint);
  const DenseInput dense = to_dense(input);
  const Geometry& g = dense.geometry;
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  const ScalarType parameters = weight ? scalar_type(*weight) : accumulate;
  const Tensor dy = with_layout_of(grad_output, dense);
  const OptionalTensor added = with_layout_of(residual, dense), grad_buffer = with_layout_of(grad, dense);
  Tensor sums = allocate_vector(2 * g.channels + header.size, accumulate, input);
  Tensor grad_weight = allocate_vector(g.channels, parameters, input);
  Tensor grad_bias = allocate_vector(g.channels, parameters, input);
  const FactorTensors factors{mean, invstd, weight, bias};
  Device device(input);
  backward_reduce(dy.const_data_ptr(), dense.tensor.const_data_ptr(),
                  grad_buffer ? grad_buffer->mutable_data_ptr() : nullptr, dtype_of(input, "input"), g,
                  BackwardReduceArguments{factors, sums.mutable_data_ptr(), mutable_per_channel_of(grad_weight),
                                          mutable_per_channel_of(grad_bias), header},
                  Epilogue{data_of(added), {activation, parameter}}, device);
  if (grad_buffer && grad_buffer->get() != grad->get()) torch::stable::copy_(*grad, *grad_buffer);
  return {sums, grad_weight, grad_bias};
}

template <typename Device>
Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const OptionalTensor& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 int64_t ranks, const OptionalTensor& fault, int64_t call, const OptionalTensor& mask,
                                 const OptionalTensor& bias, int64_t activation, double parameter,
                                 OptionalTensor grad_input) {
  check_input(input);
  check_like_input({{"grad_output", grad_output}, {"grad_input", grad_input}}, input);
  check_channels({{"weight", weight}, {"bias", bias}, {"mean", mean}, {"invstd", invstd}}, input.size(1), input);
  check_activation(activation);
  const int64_t header_size = sums.numel() - 2 * input.size(1);
  const bool fits = header_size >= 0 && header_size <= kSumsHeader && header_size % 2 == 0;
  check(fits, "sums", "2 * channels values and a header of 0, 2, 4 or 6 values", sums.numel());
  int64_t* record = fault_record(fault);
  check_device(sums, "sums", input);
  const ScalarType accumulate = accumulate_type(scalar_type(input)), given = scalar_type(sums);
  check(given == accumulate, "sums", "the accumulate dtype of input", given);
  check_counter(count, "count", input);
  check(!mask || activation == 0, "mask", "None with an activation", "a tensor");
  const DenseInput dense = to_dense(input);
  const uint8_t* valid = valid_positions(mask, dense.geometry.rows(), input);
  const Tensor dy = with_layout_of(grad_output, dense);
  Tensor dx = grad_input ? with_layout_of(*grad_input, dense) : allocate_like(dense.tensor);
  if (input.numel() > 0) {
    const FactorTensors factors{mean, invstd, weight, bias};
    const Tensor totals = to_contiguous(sums);
    const auto* number = static_cast<const int64_t*>(count.const_data_ptr());
    Device device(input);
    backward_elemt(dy.const_data_ptr(), dense.tensor.const_data_ptr(), dx.mutable_data_ptr(), dtype_of(input, "input"),
                   dense.geometry,
                   BackwardElemtArguments{factors, totals.const_data_ptr(), number, header_size, ranks, call, record},
                   valid, Epilogue{nullptr, {activation, parameter}}, device);
  }
  if (!grad_input) return with_strides_of(dx, dense, input);
  if (dx.get() != grad_input->get()) torch::stable::copy_(*grad_input, dx);
  return allocate_vector(0, scalar_type(input), input);
}

}  // namespace bagua_syncbn
