// Binds the CUDA kernels to torch. Checks, layouts and results are those of the CPU ops; the kernels know none of it.

#include <tuple>

#include "../../allocate.h"
#include "../../checks.h"
#include "../../geometry.h"
#include "context.h"
#include "workspace.h"

namespace bagua_syncbn::cuda {
namespace {

DType dtype_of(const Tensor& tensor) {
  switch (scalar_type(tensor)) {
#define BAGUA_SYNCBN_CASE(name, ...) \
  case ScalarType::name:             \
    return DType::k##name;
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
    default:
      refuse("tensor", kDTypeNames, scalar_type(tensor));
  }
}

// A per-channel argument, which outlives this: contiguous, and alive until the kernel is launched.
class PerChannelTensor {
 public:
  explicit PerChannelTensor(const Tensor& tensor) : channels_{nullptr, dtype_of(tensor)} {
    if (!tensor.is_contiguous()) copy_ = torch::stable::contiguous(tensor);
    channels_.data = const_cast<void*>((copy_ ? *copy_ : tensor).const_data_ptr());
  }
  explicit PerChannelTensor(const std::optional<Tensor>& tensor)
      : PerChannelTensor(tensor ? PerChannelTensor(*tensor) : PerChannelTensor()) {}
  PerChannelTensor() = default;

  operator PerChannel() const { return channels_; }

  // What the kernel wrote, if it wrote to a copy.
  void copy_back(Tensor tensor) const {
    if (copy_) torch::stable::copy_(tensor, *copy_);
  }

 private:
  std::optional<Tensor> copy_;
  PerChannel channels_{nullptr, DType::kFloat};
};

// Null if there is none.
const void* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// `zeros` of them, followed by the words: what a rank without values sends.
Tensor make_zeros_and(const Words& words, int64_t zeros, ScalarType dtype, const Tensor& like, const Context& context) {
  Tensor values = allocate_vector(zeros + words.count, dtype, like);
  check_cuda(zeros_and(words, values.mutable_data_ptr(), zeros, dtype_of(values), context.stream()));
  return values;
}

}  // namespace

namespace {

// `mask` may be null.
Tensor compute_stats(const Tensor& input, const Mask* mask, const Words& words) {
  const Laid laid = lay_out(input);
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  const int64_t size = packed_size(laid.geometry.channels, words.count);
  const Context context(input);
  // Zeros: a count of 0, and moments that weigh nothing.
  if (input.numel() == 0) return make_zeros_and(words, size - words.count, accumulate, input, context);
  Tensor packed = allocate_vector(size, accumulate, input);
  TorchWorkspace workspace(input, context);
  const void* x = laid.tensor.const_data_ptr();
  void* out = packed.mutable_data_ptr();
  const DType dtype = dtype_of(input);
  const Stream stream = context.stream();
  check_cuda(mask ? masked_stats(x, dtype, laid.geometry, *mask, out, words, workspace, stream)
                  : stats(x, dtype, laid.geometry, out, words, workspace, stream));
  return packed;
}

}  // namespace

Tensor batch_norm_stats(const Tensor& input, std::optional<int64_t> speaker, int64_t call) {
  check_input(input);
  return compute_stats(input, nullptr, words_of_row(speaker, call));
}

Tensor batch_norm_masked_stats(const Tensor& input, const Tensor& positions, std::optional<int64_t> speaker,
                               int64_t call) {
  check_input(input);
  const Mask mask = mask_of(positions, input);
  return compute_stats(input, &mask, words_of_row(speaker, call));
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_gather_stats(const Tensor& gathered,
                                                           const std::optional<Tensor>& running_mean,
                                                           const std::optional<Tensor>& running_var,
                                                           const std::optional<Tensor>& num_batches_tracked,
                                                           std::optional<double> momentum, double eps,
                                                           const std::optional<Tensor>& fault, bool skip_nonfinite) {
  check_gather_stats(gathered, running_mean, running_var, num_batches_tracked, momentum, fault);
  const Context context(gathered);
  const bool tracks = running_mean && running_var;
  const PerChannelTensor mean_buffer = tracks ? PerChannelTensor(*running_mean) : PerChannelTensor();
  const PerChannelTensor var_buffer = tracks ? PerChannelTensor(*running_var) : PerChannelTensor();
  void* batches = num_batches_tracked ? num_batches_tracked->mutable_data_ptr() : nullptr;
  const Tensor rows = dense(gathered);
  const int64_t words = words_in(gathered.size(1)), channels = packed_channels(gathered.size(1), words);
  Tensor mean = allocate_vector(channels, scalar_type(gathered), gathered);
  Tensor invstd = allocate_vector(channels, scalar_type(gathered), gathered);
  Tensor count = allocate_scalar(ScalarType::Long, gathered);
  check_cuda(
      gather_stats({rows.const_data_ptr(), gathered.size(0), channels, dtype_of(gathered), mean.mutable_data_ptr(),
                    invstd.mutable_data_ptr(), static_cast<int64_t*>(count.mutable_data_ptr()), mean_buffer, var_buffer,
                    static_cast<int64_t*>(batches), tracks && !momentum, momentum.value_or(0), eps, words,
                    skip_nonfinite, record_of(fault)},
                   context.stream()));
  if (tracks) {
    mean_buffer.copy_back(*running_mean);
    var_buffer.copy_back(*running_var);
  }
  return {mean, invstd, count};
}

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd) {
  check_elemt(input, weight, bias, mean, invstd);
  const Laid laid = lay_out(input);
  const Context context(input);
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  const PerChannelTensor means(mean), invstds(invstd), weights(weight), biases(bias);
  check_cuda(elemt(laid.tensor.const_data_ptr(), output.mutable_data_ptr(), dtype_of(input), laid.geometry,
                   {means, invstds, weights, biases}, context.stream()));
  return with_strides_of(output, laid, input);
}

Tensor batch_norm_masked_elemt(const Tensor& input, const std::optional<Tensor>& weight,
                               const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& invstd,
                               const Tensor& positions) {
  check_elemt(input, weight, bias, mean, invstd);
  const Mask mask = mask_of(positions, input);
  const Laid laid = lay_out(input);
  const Context context(input);
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  const PerChannelTensor means(mean), invstds(invstd), weights(weight), biases(bias);
  check_cuda(masked_elemt(laid.tensor.const_data_ptr(), output.mutable_data_ptr(), dtype_of(input), laid.geometry, mask,
                          {means, invstds, weights, biases}, context.stream()));
  return with_strides_of(output, laid, input);
}

Tensor batch_norm_act_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                            const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                            int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  check_act(input, weight, bias, residual, activation);
  const Laid laid = lay_out(input);
  const Context context(input);
  const std::optional<Tensor> added = residual ? std::optional(laid_out_like(*residual, laid)) : std::nullopt;
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  const PerChannelTensor means(mean), invstds(invstd), weights(weight), biases(bias);
  check_cuda(act_elemt(laid.tensor.const_data_ptr(), data_of(added), output.mutable_data_ptr(), dtype_of(input),
                       laid.geometry, {means, invstds, weights, biases}, {activation, parameter}, context.stream()));
  return with_strides_of(output, laid, input);
}

namespace {

using Sums = std::tuple<Tensor, Tensor, Tensor>;

// `reduce(dy, arguments, workspace, stream)` launches the kernel.
template <typename Reduce>
Sums sums_of(const Tensor& grad_output, const Tensor& input, const Laid& laid, const Tensor& mean, const Tensor& invstd,
             const std::optional<Tensor>& weight, const Words& words, const Reduce& reduce) {
  const Context context(input);
  const Tensor grads = laid_out_like(grad_output, laid);
  const int64_t channels = laid.geometry.channels, width = 2 * channels;
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  const ScalarType parameter = weight ? scalar_type(*weight) : accumulate;
  if (input.numel() == 0) {
    return {make_zeros_and(words, width, accumulate, input, context),
            torch::stable::new_zeros(input, {&channels, 1}, parameter),
            torch::stable::new_zeros(input, {&channels, 1}, parameter)};
  }
  const PerChannelTensor means(mean), invstds(invstd);
  Tensor sums = allocate_vector(width + words.count, accumulate, input);
  Tensor grad_weight = allocate_vector(channels, parameter, input);
  Tensor grad_bias = allocate_vector(channels, parameter, input);
  TorchWorkspace workspace(input, context);
  const BackwardReduceArguments arguments{means,
                                          invstds,
                                          sums.mutable_data_ptr(),
                                          {grad_weight.mutable_data_ptr(), dtype_of(grad_weight)},
                                          {grad_bias.mutable_data_ptr(), dtype_of(grad_bias)},
                                          words};
  check_cuda(reduce(grads.const_data_ptr(), arguments, workspace, context.stream()));
  return {sums, grad_weight, grad_bias};
}

}  // namespace

Sums batch_norm_backward_reduce(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                const Tensor& invstd, const std::optional<Tensor>& weight,
                                std::optional<int64_t> fingerprint) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  const Laid laid = lay_out(input);
  const auto reduce = [&](const void* dy, const BackwardReduceArguments& arguments, Workspace& workspace,
                          Stream stream) {
    return backward_reduce(dy, laid.tensor.const_data_ptr(), dtype_of(input), laid.geometry, arguments, workspace,
                           stream);
  };
  return sums_of(grad_output, input, laid, mean, invstd, weight, words_of_sums(fingerprint), reduce);
}

Sums batch_norm_masked_backward_reduce(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                       const Tensor& invstd, const std::optional<Tensor>& weight,
                                       const Tensor& positions, std::optional<int64_t> fingerprint) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  const Mask mask = mask_of(positions, input);
  const Laid laid = lay_out(input);
  const auto reduce = [&](const void* dy, const BackwardReduceArguments& arguments, Workspace& workspace,
                          Stream stream) {
    return masked_backward_reduce(dy, laid.tensor.const_data_ptr(), dtype_of(input), laid.geometry, mask, arguments,
                                  workspace, stream);
  };
  return sums_of(grad_output, input, laid, mean, invstd, weight, words_of_sums(fingerprint), reduce);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_act_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
    int64_t activation, double parameter, std::optional<int64_t> fingerprint, bool with_grad) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  check_act(input, weight, bias, residual, activation);
  const Laid laid = lay_out(input);
  const std::optional<Tensor> added = residual ? std::optional(laid_out_like(*residual, laid)) : std::nullopt;
  const Tensor grad = with_grad ? allocate_like(laid.tensor) : allocate_vector(0, scalar_type(input), input);
  const PerChannelTensor means(mean), invstds(invstd), weights(weight), biases(bias);
  const auto reduce = [&](const void* dy, const BackwardReduceArguments& arguments, Workspace& workspace,
                          Stream stream) {
    return act_backward_reduce(dy, laid.tensor.const_data_ptr(), data_of(added),
                               with_grad ? grad.mutable_data_ptr() : nullptr, dtype_of(input), laid.geometry,
                               {means, invstds, weights, biases}, arguments, {activation, parameter}, workspace,
                               stream);
  };
  const auto [sums, grad_weight, grad_bias] =
      sums_of(grad_output, input, laid, mean, invstd, weight, words_of_sums(fingerprint), reduce);
  return {sums, grad_weight, grad_bias, with_grad ? with_strides_of(grad, laid, input) : grad};
}

namespace {

// `start(dy, x, dx, geometry, arguments, stream)` launches the kernel.
template <typename Start>
Tensor input_gradient(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                      const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count, int64_t ranks,
                      int64_t call, const std::optional<Tensor>& fault, const Start& start) {
  const Laid laid = lay_out(input);
  const Context context(input);
  const Tensor grads = laid_out_like(grad_output, laid);
  Tensor grad_input = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(grad_input, laid, input);
  const PerChannelTensor means(mean), invstds(invstd), weights(weight), totals(sums);
  const BackwardElemtArguments arguments{means,
                                         invstds,
                                         weights,
                                         totals,
                                         static_cast<const int64_t*>(count.const_data_ptr()),
                                         sums.numel() - 2 * laid.geometry.channels,
                                         ranks,
                                         call,
                                         record_of(fault)};
  check_cuda(start(grads.const_data_ptr(), laid.tensor.const_data_ptr(), grad_input.mutable_data_ptr(), laid.geometry,
                   arguments, context.stream()));
  return with_strides_of(grad_input, laid, input);
}

}  // namespace

Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 int64_t ranks, const std::optional<Tensor>& fault, int64_t call) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault);
  const auto start = [&](const void* dy, const void* x, void* dx, const Geometry& g,
                         const BackwardElemtArguments& arguments,
                         Stream stream) { return backward_elemt(dy, x, dx, dtype_of(input), g, arguments, stream); };
  return input_gradient(grad_output, input, weight, mean, invstd, sums, count, ranks, call, fault, start);
}

Tensor batch_norm_masked_backward_elemt(const Tensor& grad_output, const Tensor& input,
                                        const std::optional<Tensor>& weight, const Tensor& mean, const Tensor& invstd,
                                        const Tensor& sums, const Tensor& count, const Tensor& positions, bool zeroes,
                                        int64_t ranks, const std::optional<Tensor>& fault, int64_t call) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault);
  const Mask mask = mask_of(positions, input);
  const auto start = [&](const void* dy, const void* x, void* dx, const Geometry& g,
                         const BackwardElemtArguments& arguments, Stream stream) {
    return masked_backward_elemt(dy, x, dx, dtype_of(input), g, mask, zeroes, arguments, stream);
  };
  return input_gradient(grad_output, input, weight, mean, invstd, sums, count, ranks, call, fault, start);
}

Tensor batch_norm_act_backward_elemt(const Tensor& grad_output, const Tensor& input,
                                     const std::optional<Tensor>& weight, const Tensor& mean, const Tensor& invstd,
                                     const Tensor& sums, const Tensor& count, const std::optional<Tensor>& bias,
                                     int64_t activation, double parameter, int64_t ranks,
                                     const std::optional<Tensor>& fault, int64_t call) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault);
  check_act(input, weight, bias, std::nullopt, activation);
  const PerChannelTensor biases(bias);
  const auto start = [&](const void* dy, const void* x, void* dx, const Geometry& g,
                         const BackwardElemtArguments& arguments, Stream stream) {
    return act_backward_elemt(dy, x, dx, dtype_of(input), g, arguments, biases, {activation, parameter}, stream);
  };
  return input_gradient(grad_output, input, weight, mean, invstd, sums, count, ranks, call, fault, start);
}

namespace {

// Runs `kernel`; or, where the kernels of this library do not run, the op `fallback`, of the same schema, which
// computes in plain torch and says why (bagua_syncbn/ops/fallback.py). The first argument of every op is a tensor.
void run_or_fall_back(void (*kernel)(StableIValue*, uint64_t, uint64_t), const char* fallback, StableIValue* stack,
                      uint64_t arguments, uint64_t results) {
  int32_t device = 0;
  const auto input = torch::stable::detail::to<AtenTensorHandle>(stack[0]);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(input, &device));
  if (support_of(device) == Support::kRuns) return kernel(stack, arguments, results);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(fallback, "", stack, TORCH_ABI_VERSION));
}

}  // namespace
}  // namespace bagua_syncbn::cuda

#define BAGUA_SYNCBN_REGISTER(name)                                                                                    \
  m.impl(#name, [](StableIValue* stack, uint64_t arguments, uint64_t results) {                                        \
    bagua_syncbn::cuda::run_or_fall_back(TORCH_BOX(&bagua_syncbn::cuda::name), "bagua_syncbn_fallback::" #name, stack, \
                                         arguments, results);                                                          \
  })

#if defined(BAGUA_SYNCBN_EMULATOR)  // tests run all of this on CPU tensors
STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn_emulated, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CUDA, m) {
#endif
  BAGUA_SYNCBN_REGISTER(batch_norm_stats);
  BAGUA_SYNCBN_REGISTER(batch_norm_gather_stats);
  BAGUA_SYNCBN_REGISTER(batch_norm_elemt);
  BAGUA_SYNCBN_REGISTER(batch_norm_backward_reduce);
  BAGUA_SYNCBN_REGISTER(batch_norm_backward_elemt);
  BAGUA_SYNCBN_REGISTER(batch_norm_masked_stats);
  BAGUA_SYNCBN_REGISTER(batch_norm_masked_elemt);
  BAGUA_SYNCBN_REGISTER(batch_norm_masked_backward_reduce);
  BAGUA_SYNCBN_REGISTER(batch_norm_masked_backward_elemt);
  BAGUA_SYNCBN_REGISTER(batch_norm_act_elemt);
  BAGUA_SYNCBN_REGISTER(batch_norm_act_backward_reduce);
  BAGUA_SYNCBN_REGISTER(batch_norm_act_backward_elemt);
}
