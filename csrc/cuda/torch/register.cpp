// Binds the CUDA kernels to torch. Checks, layouts and results are those of the CPU ops; the kernels know none of it.

#include <tuple>

#include "../../allocate.h"
#include "../../checks.h"
#include "../../geometry.h"
#include "context.h"

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

// A per-channel argument: contiguous, and alive until the kernel is launched. Null if there is none.
class PerChannelTensor {
 public:
  PerChannelTensor(const Tensor& tensor) : tensor_(dense(tensor)) {}
  PerChannelTensor(const std::optional<Tensor>& tensor)
      : tensor_(tensor ? std::optional(dense(*tensor)) : std::nullopt) {}

  operator PerChannel() const {
    return tensor_ ? PerChannel{const_cast<void*>(tensor_->const_data_ptr()), dtype_of(*tensor_)} : PerChannel{};
  }
  // Copies the result back, if the kernel wrote to a copy.
  void copy_back(Tensor tensor) const {
    if (tensor_->get() != tensor.get()) torch::stable::copy_(tensor, *tensor_);
  }

 private:
  std::optional<Tensor> tensor_;
};

// The factors of an op.
struct FactorTensors {
  PerChannelTensor mean, invstd, weight, bias;

  operator Factors() const { return {mean, invstd, weight, bias}; }
};

// The epilogue, whose tensors outlive this.
Options options_of(const std::optional<Tensor>& residual, int64_t activation, double parameter) {
  return {residual ? residual->const_data_ptr() : nullptr, {activation, parameter}};
}

// `zeros` of them, followed by the words: what a rank without values sends.
Tensor make_zeros_and(const Words& words, int64_t zeros, ScalarType dtype, const Tensor& like, const Context& context) {
  Tensor values = allocate_vector(zeros + words.count, dtype, like);
  check_cuda(zeros_and(words, values.mutable_data_ptr(), zeros, dtype_of(values), context.stream()));
  return values;
}

}  // namespace

Tensor batch_norm_stats(const Tensor& input, std::optional<int64_t> speaker, int64_t call,
                        const std::optional<Tensor>& mask) {
  check_input(input);
  const std::optional<Mask> where = mask_of(mask, input);
  const Words words = words_of_row(speaker, call);
  const Laid laid = lay_out(input);
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  const int64_t size = packed_size(laid.geometry.channels, words.count);
  Context context(input);
  // Zeros: a count of 0, and moments that weigh nothing.
  if (input.numel() == 0) return make_zeros_and(words, size - words.count, accumulate, input, context);
  Tensor packed = allocate_vector(size, accumulate, input);
  check_cuda(stats(laid.tensor.const_data_ptr(), dtype_of(input), laid.geometry, where ? &*where : nullptr,
                   packed.mutable_data_ptr(), words, context, context.stream()));
  return packed;
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
  const PerChannelTensor mean_buffer(tracks ? running_mean : std::nullopt);
  const PerChannelTensor var_buffer(tracks ? running_var : std::nullopt);
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
                        const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                        int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  check_act(input, weight, bias, residual, activation);
  const Laid laid = lay_out(input);
  const Context context(input);
  const std::optional<Tensor> added = laid_out_like(residual, laid);
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  const FactorTensors factors{mean, invstd, weight, bias};
  check_cuda(elemt(laid.tensor.const_data_ptr(), output.mutable_data_ptr(), dtype_of(input), laid.geometry, factors,
                   options_of(added, activation, parameter), context.stream()));
  return with_strides_of(output, laid, input);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const std::optional<Tensor>& weight, std::optional<int64_t> fingerprint, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, int64_t activation, double parameter, std::optional<Tensor> grad) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  check_act(input, weight, bias, residual, activation);
  if (grad) check_like_input(*grad, "grad", input);
  const Words words = words_of_sums(fingerprint);
  const Laid laid = lay_out(input);
  Context context(input);
  const int64_t channels = laid.geometry.channels, width = 2 * channels;
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  const ScalarType parameters = weight ? scalar_type(*weight) : accumulate;
  if (input.numel() == 0) {
    return {make_zeros_and(words, width, accumulate, input, context),
            torch::stable::new_zeros(input, {&channels, 1}, parameters),
            torch::stable::new_zeros(input, {&channels, 1}, parameters)};
  }
  const Tensor dy = laid_out_like(grad_output, laid);
  const std::optional<Tensor> added = laid_out_like(residual, laid);
  const std::optional<Tensor> g = laid_out_like(grad, laid);
  const FactorTensors factors{mean, invstd, weight, bias};
  Tensor sums = allocate_vector(width + words.count, accumulate, input);
  Tensor grad_weight = allocate_vector(channels, parameters, input);
  Tensor grad_bias = allocate_vector(channels, parameters, input);
  const BackwardReduceArguments arguments{factors,
                                          sums.mutable_data_ptr(),
                                          {grad_weight.mutable_data_ptr(), dtype_of(grad_weight)},
                                          {grad_bias.mutable_data_ptr(), dtype_of(grad_bias)},
                                          words};
  check_cuda(backward_reduce(dy.const_data_ptr(), laid.tensor.const_data_ptr(), g ? g->mutable_data_ptr() : nullptr,
                             dtype_of(input), laid.geometry, arguments, options_of(added, activation, parameter),
                             context, context.stream()));
  if (g && g->get() != grad->get()) torch::stable::copy_(*grad, *g);
  return {sums, grad_weight, grad_bias};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 int64_t ranks, const std::optional<Tensor>& fault, int64_t call,
                                 const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                                 int64_t activation, double parameter, std::optional<Tensor> into) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault, into);
  check_act(input, weight, bias, std::nullopt, activation);
  const std::optional<Mask> where = mask_without_act(mask, input, activation);
  const Laid laid = lay_out(input);
  const Context context(input);
  const Tensor dy = laid_out_like(grad_output, laid);
  Tensor grad_input = into ? laid_out_like(*into, laid) : allocate_like(laid.tensor);
  const FactorTensors factors{mean, invstd, weight, bias};
  const PerChannelTensor totals(sums);
  const int64_t words = sums.numel() - 2 * laid.geometry.channels;
  const auto* number = static_cast<const int64_t*>(count.const_data_ptr());
  const BackwardElemtArguments arguments{factors, totals, number, words, ranks, call, record_of(fault)};
  if (input.numel() > 0) {
    check_cuda(backward_elemt(dy.const_data_ptr(), laid.tensor.const_data_ptr(), grad_input.mutable_data_ptr(),
                              dtype_of(input), laid.geometry, arguments, where ? &*where : nullptr,
                              options_of(std::nullopt, activation, parameter), context.stream()));
  }
  if (!into) return with_strides_of(grad_input, laid, input);
  if (grad_input.get() != into->get()) torch::stable::copy_(*into, grad_input);
  return allocate_vector(0, scalar_type(input), input);
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
}
