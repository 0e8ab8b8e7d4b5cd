// The ops as torch calls them, for CPU and CUDA. They check arguments, make them dense, allocate results and call the
// kernels of `Device` (cpu/kernels.h, cuda/kernels.h).
#pragma once

#include <tuple>

#include "arguments.h"
#include "checks.h"
#include "geometry.h"

namespace bagua_syncbn {

inline void make_contiguous(Tensor& tensor) {
  if (!tensor.is_contiguous()) tensor = torch::stable::contiguous(tensor);
}

// Copies `result` to `target`, unless it is the same tensor.
inline void write_back(OptionalTensor& target, const OptionalTensor& result) {
  if (target && target->get() != result->get()) torch::stable::copy_(*target, *result);
}

// Checks the per-channel tensors of z = (x - mean) * invstd * weight + bias, and makes them contiguous.
inline Factors factors_of(const Tensor& input, Tensor& mean, Tensor& invstd, OptionalTensor& weight,
                          OptionalTensor& bias) {
  const auto checked = [&](Tensor& tensor, const char* name) {
    const DType dtype = check_channels(tensor, name, input.size(1), input);
    make_contiguous(tensor);
    return PerChannel{tensor.const_data_ptr(), dtype};
  };
  return {checked(mean, "mean"), checked(invstd, "invstd"), weight ? checked(*weight, "weight") : PerChannel{},
          bias ? checked(*bias, "bias") : PerChannel{}};
}

inline Epilogue epilogue_of(const OptionalTensor& residual, int64_t activation, double parameter) {
  const bool known = activation >= 0 && activation < kActivations;
  check(known, "activation", "an index in bagua_syncbn/_ops/activations.py", activation);
  return {residual ? residual->const_data_ptr() : nullptr, activation, parameter};
}

template <typename Device>
Tensor batch_norm_stats(const Tensor& input, std::optional<int64_t> identity, int64_t message_number,
                        const OptionalTensor& mask, bool summed) {
  const DType dtype = check_input(input);
  const Header header = summed ? sums_header(identity.value_or(0)) : row_header(identity, message_number);
  const DenseInput dense = to_dense(input);
  const Geometry& g = dense.geometry;
  const uint8_t* valid = valid_positions(mask, g.rows(), input);
  const int64_t size = summed ? sums_size_of(g.channels) : row_size_of(g.channels, header.size);
  const ScalarType packed_dtype = summed ? ScalarType::Double : accumulate_type(scalar_type(input));
  Tensor packed = allocate_vector(size, packed_dtype, input);
  Device device(input);
  stats(dense.tensor.const_data_ptr(), dtype, g, valid, packed.mutable_data_ptr(), header, device);
  return packed;
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> batch_norm_gather_stats(Tensor gathered, OptionalTensor running_mean,
                                                           OptionalTensor running_var,
                                                           const OptionalTensor& num_batches_tracked,
                                                           std::optional<double> momentum, double eps,
                                                           const OptionalTensor& fault, bool skip_nonfinite,
                                                           int64_t ranks, int64_t message_number) {
  GatherArguments merge{};
  merge.summed = gathered.dim() == 1;
  const int64_t size = merge.summed || gathered.dim() == 2 ? gathered.size(-1) : 0;
  merge.header_size = merge.summed ? kSumsHeader : header_size_of(size);
  const int64_t rest = size - (merge.summed ? sums_size_of(0) : row_size_of(0, merge.header_size));
  if (rest < 0 || rest % 2 != 0)
    refuse("gathered", "(ranks, 2 * channels + 2 or 5), or 2 * channels + 7 values", sizes_of(gathered));
  merge.channels = rest / 2;
  merge.ranks = merge.summed ? ranks : gathered.size(0);
  merge.message_number = message_number;
  const ScalarType given = scalar_type(gathered), dtype = merge.summed ? ScalarType::Float : given;
  check(given == (merge.summed ? ScalarType::Double : accumulate_type(given)), "gathered",
        merge.summed ? "float64 for a sum" : "float32 or float64", given);
  merge.fault = fault_record(fault);
  if (num_batches_tracked) {
    check_counter(*num_batches_tracked, "num_batches_tracked", gathered);
    merge.batches = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
  }
  const bool tracks = running_mean && running_var, has_factor = momentum || num_batches_tracked;
  check(!tracks || has_factor, "num_batches_tracked", "a tensor, because momentum is None", "None");
  if (!tracks) running_mean = running_var = std::nullopt;
  OptionalTensor dense_mean = running_mean, dense_var = running_var;
  const auto buffer = [&](OptionalTensor& running, const char* name) {
    if (!running) return MutablePerChannel{};
    const DType buffer_dtype = check_channels(*running, name, merge.channels, gathered);
    const bool separate = running->is_contiguous() || running->stride(0) != 0;
    check(separate, name, "an element in memory for each channel", "an expanded tensor");
    make_contiguous(*running);
    return MutablePerChannel{running->mutable_data_ptr(), buffer_dtype};
  };
  merge.running_mean = buffer(dense_mean, "running_mean");
  merge.running_var = buffer(dense_var, "running_var");
  merge.averages = tracks && !momentum;
  merge.momentum = momentum.value_or(0);
  merge.eps = eps;
  merge.skip_nonfinite = skip_nonfinite;
  make_contiguous(gathered);
  merge.gathered = gathered.const_data_ptr();
  Tensor mean = allocate_vector(merge.channels, dtype, gathered);
  Tensor invstd = allocate_vector(merge.channels, dtype, gathered);
  Tensor count = allocate({}, {}, ScalarType::Long, gathered);
  merge.accumulate = dtype_of(mean, "mean");
  merge.mean = mean.mutable_data_ptr();
  merge.invstd = invstd.mutable_data_ptr();
  merge.count = static_cast<int64_t*>(count.mutable_data_ptr());
  Device device(gathered);
  gather_stats(merge, device);
  write_back(running_mean, dense_mean);
  write_back(running_var, dense_var);
  return {mean, invstd, count};
}

template <typename Device>
Tensor batch_norm_elemt(const Tensor& input, OptionalTensor weight, OptionalTensor bias, Tensor mean, Tensor invstd,
                        const OptionalTensor& residual, int64_t activation, double parameter) {
  const DType dtype = check_input(input);
  const Factors factors = factors_of(input, mean, invstd, weight, bias);
  const DenseInput dense = to_dense(input);
  const OptionalTensor added = with_layout_of(dense, residual, "residual");
  const Epilogue epilogue = epilogue_of(added, activation, parameter);
  Tensor output = allocate_like(dense.tensor);
  if (input.numel() > 0) {
    Device device(input);
    elemt(dense.tensor.const_data_ptr(), output.mutable_data_ptr(), dtype, dense.geometry, factors, epilogue, device);
  }
  return with_strides_of(output, dense, input);
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad_output, const Tensor& input,
                                                              Tensor mean, Tensor invstd, OptionalTensor weight,
                                                              std::optional<int64_t> fingerprint, OptionalTensor bias,
                                                              const OptionalTensor& residual, int64_t activation,
                                                              double parameter, OptionalTensor grad) {
  const DType dtype = check_input(input);
  const Factors factors = factors_of(input, mean, invstd, weight, bias);
  const Header header = sums_header(fingerprint);
  const DenseInput dense = to_dense(input);
  const Geometry& g = dense.geometry;
  const Tensor dy = with_layout_of(dense, grad_output, "grad_output");
  const OptionalTensor added = with_layout_of(dense, residual, "residual");
  const OptionalTensor grad_buffer = with_layout_of(dense, grad, "grad");
  const Epilogue epilogue = epilogue_of(added, activation, parameter);
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  Tensor sums = allocate_vector(2 * g.channels + header.size, accumulate, input);
  const ScalarType parameters = weight ? scalar_type(*weight) : accumulate;
  Tensor grad_weight = allocate_vector(g.channels, parameters, input);
  Tensor grad_bias = allocate_vector(g.channels, parameters, input);
  const DType stored = dtype_of(grad_bias, "grad_bias");
  Device device(input);
  backward_reduce(dy.const_data_ptr(), dense.tensor.const_data_ptr(),
                  grad_buffer ? grad_buffer->mutable_data_ptr() : nullptr, dtype, g,
                  BackwardReduceArguments{factors,
                                          sums.mutable_data_ptr(),
                                          {grad_weight.mutable_data_ptr(), stored},
                                          {grad_bias.mutable_data_ptr(), stored},
                                          header},
                  epilogue, device);
  write_back(grad, grad_buffer);
  return {sums, grad_weight, grad_bias};
}

template <typename Device>
Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, OptionalTensor weight, Tensor mean,
                                 Tensor invstd, Tensor sums, const Tensor& count, int64_t ranks,
                                 const OptionalTensor& fault, int64_t message_number, const OptionalTensor& mask,
                                 OptionalTensor bias, int64_t activation, double parameter, OptionalTensor grad_input) {
  const DType dtype = check_input(input);
  const Factors factors = factors_of(input, mean, invstd, weight, bias);
  const int64_t header_size = sums.numel() - 2 * input.size(1);
  const bool fits = header_size >= 0 && header_size <= kSumsHeader && header_size % 2 == 0;
  check(fits, "sums", "2 * channels values and a header of 0, 2, 4 or 6 values", sums.numel());
  check_device(sums, "sums", input);
  const ScalarType given = scalar_type(sums);
  check(given == accumulate_type(scalar_type(input)), "sums", "the accumulate dtype of input", given);
  check_counter(count, "count", input);
  check(!mask || activation == 0, "mask", "None with an activation", "a tensor");
  const Epilogue epilogue = epilogue_of(std::nullopt, activation, parameter);
  const DenseInput dense = to_dense(input);
  const uint8_t* valid = valid_positions(mask, dense.geometry.rows(), input);
  const Tensor dy = with_layout_of(dense, grad_output, "grad_output");
  Tensor dx = grad_input ? with_layout_of(dense, *grad_input, "grad_input") : allocate_like(dense.tensor);
  int64_t* record = fault_record(fault);
  if (input.numel() > 0) {
    make_contiguous(sums);
    const auto* number = static_cast<const int64_t*>(count.const_data_ptr());
    Device device(input);
    backward_elemt(
        dy.const_data_ptr(), dense.tensor.const_data_ptr(), dx.mutable_data_ptr(), dtype, dense.geometry,
        BackwardElemtArguments{factors, sums.const_data_ptr(), number, header_size, ranks, message_number, record},
        valid, epilogue, device);
  }
  if (!grad_input) return with_strides_of(dx, dense, input);
  write_back(grad_input, dx);
  return allocate_vector(0, scalar_type(input), input);
}

template <typename Device, typename Library>
void register_ops(Library& library) {
  library.impl("batch_norm_stats", TORCH_BOX(&batch_norm_stats<Device>));
  library.impl("batch_norm_gather_stats", TORCH_BOX(&batch_norm_gather_stats<Device>));
  library.impl("batch_norm_elemt", TORCH_BOX(&batch_norm_elemt<Device>));
  library.impl("batch_norm_backward_reduce", TORCH_BOX(&batch_norm_backward_reduce<Device>));
  library.impl("batch_norm_backward_elemt", TORCH_BOX(&batch_norm_backward_elemt<Device>));
}

}  // namespace bagua_syncbn
