// Binds the CUDA kernels to torch. Checks, layouts and results are those of the CPU ops; the kernels know none of it.

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "../geometry.h"
#include "../packed_stats.h"
#include "kernels.h"

// Defined by libtorch_cuda, of which this library must not depend: it also loads beside a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace bagua_syncbn::cuda {
namespace {

using StreamGetter = decltype(&aoti_torch_get_current_cuda_stream);

// The weak symbol is found where libtorch_cuda is in the global scope. Python loads it into a scope of its own, where
// it is found by its name; RTLD_NOLOAD, because only the one that torch itself uses will do.
StreamGetter find_stream_getter() {
  if (&aoti_torch_get_current_cuda_stream != nullptr) return &aoti_torch_get_current_cuda_stream;
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<StreamGetter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
}

void check_cuda(const char* error) {
  check(error == nullptr, "CUDA", "success", error == nullptr ? "" : error);
}

// Makes the device of `input` current as long as it lives, for torch and for the CUDA runtime in this library, and
// knows the stream that torch uses there.
class Context {
 public:
  explicit Context(const Tensor& input) : device_(input.get_device_index()), guard_(device_) {
    static const StreamGetter getter = find_stream_getter();
    check(getter != nullptr, "input", "a torch with CUDA", "one without");
    check_cuda(set_device(device_));
    void* stream = nullptr;
    check(getter(device_, &stream) == 0, "input", "it on a device with a current stream", device_);
    stream_ = static_cast<Stream>(stream);
  }

  int32_t device() const { return device_; }
  Stream stream() const { return stream_; }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  Stream stream_;
};

// Memory from torch's allocator. It is freed on the host while the kernel may still be running; the allocator gives it
// out again for later work on the same stream only.
class TorchWorkspace final : public Workspace {
 public:
  TorchWorkspace(const Tensor& like, const Context& context) : like_(like), context_(context) {}

  double* partials(int64_t count) override {
    partials_ = torch::stable::new_empty(like_, {&count, 1}, ScalarType::Double);
    return static_cast<double*>(partials_->mutable_data_ptr());
  }

  // One set for each stream, zeroed once: kernels of one stream do not overlap, and leave the counters zero. A graph is
  // another matter: it may be replayed beside this stream, and what is zeroed during capture is zeroed in replay only.
  uint32_t* tickets() override {
    bool capturing = false;
    check_cuda(is_capturing(context_.stream(), capturing));
    if (capturing) {
      tickets_ = make_tickets();
      return static_cast<uint32_t*>(tickets_->mutable_data_ptr());
    }
    // Never destroyed: at exit, torch may be gone first.
    static auto* const mutex = new std::mutex;
    static auto* const sets = new std::map<std::pair<int32_t, Stream>, Tensor>;
    const std::lock_guard<std::mutex> lock(*mutex);
    const auto key = std::make_pair(context_.device(), context_.stream());
    auto found = sets->find(key);
    if (found == sets->end()) found = sets->emplace(key, make_tickets()).first;
    return static_cast<uint32_t*>(found->second.mutable_data_ptr());
  }

 private:
  Tensor make_tickets() const {
    const int64_t count = kTickets;
    return torch::stable::new_zeros(like_, {&count, 1}, ScalarType::Int);
  }

  const Tensor& like_;
  const Context& context_;
  std::optional<Tensor> partials_, tickets_;
};

DType dtype_of(const Tensor& tensor, const char* name) {
  DType dtype = DType::kFloat;
  dispatch_floating(tensor.scalar_type(), name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, Half>) dtype = DType::kHalf;
    if constexpr (std::is_same_v<T, BFloat16>) dtype = DType::kBFloat16;
    if constexpr (std::is_same_v<T, double>) dtype = DType::kDouble;
  });
  return dtype;
}

bool is_on(const Tensor& tensor, int32_t device) {
  return tensor.is_cuda() && tensor.get_device_index() == device;
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A per-channel argument: checked, contiguous, and alive until the kernel is launched.
class PerChannel {
 public:
  PerChannel(const std::optional<Tensor>& tensor, int64_t count, const char* name, int32_t device) {
    if (!tensor) return;
    check(tensor->numel() == count, name, "one element for each channel", tensor->numel());
    check(is_on(*tensor, device), name, "it on the device of input", "another device");
    channels_.dtype = dtype_of(*tensor, name);
    dense_ = dense(*tensor);
    channels_.data = const_cast<void*>(dense_->const_data_ptr());
  }

  operator Channels() const { return channels_; }

  // What the kernel wrote, if it wrote to a copy.
  void copy_back(const std::optional<Tensor>& tensor) const {
    if (!tensor || tensor->get() == dense_->get()) return;
    Tensor target = *tensor;
    torch::stable::copy_(target, *dense_);
  }

 private:
  std::optional<Tensor> dense_;
  Channels channels_{nullptr, DType::kFloat};
};

const int64_t* counter(const Tensor& tensor, const char* name, int32_t device) {
  const bool counts = tensor.scalar_type() == ScalarType::Long && tensor.numel() == 1 && is_on(tensor, device);
  check(counts, name, "an int64 scalar on the device of input", "another tensor");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

Tensor new_channels(const Tensor& like, int64_t count, ScalarType dtype) {
  return torch::stable::new_empty(like, {&count, 1}, dtype);
}

}  // namespace

Tensor batch_norm_stats(Tensor input) {
  const Laid laid = lay_out(input);
  const DType dtype = dtype_of(input, "input");
  const ScalarType accumulate = accumulate_type(input.scalar_type());
  const int64_t size = packed_size(laid.geometry.channels);
  const Context context(input);
  // Zeros: a count of 0, and moments that weigh nothing.
  if (input.numel() == 0) return torch::stable::new_zeros(input, {&size, 1}, accumulate);
  Tensor packed = new_channels(input, size, accumulate);
  TorchWorkspace workspace(input, context);
  check_cuda(stats(laid.tensor.const_data_ptr(), dtype, laid.geometry, packed.mutable_data_ptr(), workspace,
                   context.stream()));
  return packed;
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_gather_stats(Tensor gathered, std::optional<Tensor> running_mean,
                                                           std::optional<Tensor> running_var,
                                                           std::optional<Tensor> num_batches_tracked,
                                                           std::optional<double> momentum, double eps) {
  const bool packed = gathered.dim() == 2 && gathered.size(1) >= 2 && gathered.size(1) % 2 == 0;
  check(packed, "gathered", "(ranks, 2 * channels + 2)", gathered.dim());
  const ScalarType dtype = gathered.scalar_type();
  check(dtype == accumulate_type(dtype), "gathered", "float32 or float64", torch::headeronly::toString(dtype));
  const bool tracks = running_mean && running_var;
  check(!tracks || momentum || num_batches_tracked, "num_batches_tracked", "a tensor, because momentum is None",
        "None");
  const Context context(gathered);
  const int32_t device = context.device();
  const int64_t channels = packed_channels(gathered.size(1));
  const std::optional<Tensor> tracked_mean = tracks ? running_mean : std::nullopt;
  const std::optional<Tensor> tracked_var = tracks ? running_var : std::nullopt;
  const PerChannel mean_buffer(tracked_mean, channels, "running_mean", device);
  const PerChannel var_buffer(tracked_var, channels, "running_var", device);
  const int64_t* batches = num_batches_tracked ? counter(*num_batches_tracked, "num_batches_tracked", device) : nullptr;
  const Tensor rows = dense(gathered);
  Tensor mean = new_channels(gathered, channels, dtype), invstd = new_channels(gathered, channels, dtype);
  Tensor count = torch::stable::new_empty(gathered, {}, ScalarType::Long);
  check_cuda(gather_stats(
      {rows.const_data_ptr(), gathered.size(0), channels, dtype_of(gathered, "gathered"), mean.mutable_data_ptr(),
       invstd.mutable_data_ptr(), static_cast<int64_t*>(count.mutable_data_ptr()), mean_buffer, var_buffer,
       const_cast<int64_t*>(batches), tracks && !momentum, momentum.value_or(0), eps},
      context.stream()));
  mean_buffer.copy_back(tracked_mean);
  var_buffer.copy_back(tracked_var);
  return {mean, invstd, count};
}

Tensor batch_norm_elemt(Tensor input, std::optional<Tensor> weight, std::optional<Tensor> bias, Tensor mean,
                        Tensor invstd) {
  const Laid laid = lay_out(input);
  const DType dtype = dtype_of(input, "input");
  const Context context(input);
  Tensor output = torch::stable::empty_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  const auto per_channel = [&](const std::optional<Tensor>& tensor, const char* name) {
    return PerChannel(tensor, laid.geometry.channels, name, context.device());
  };
  const PerChannel means = per_channel(mean, "mean"), biases = per_channel(bias, "bias");
  const PerChannel weights = per_channel(weight, "weight"), invstds = per_channel(invstd, "invstd");
  check_cuda(elemt(laid.tensor.const_data_ptr(), output.mutable_data_ptr(), dtype, laid.geometry,
                   {means, invstds, weights, biases}, context.stream()));
  return with_strides_of(output, laid, input);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor mean,
                                                              Tensor invstd, std::optional<Tensor> weight) {
  check_same_input(grad_output, input);
  const Laid laid = lay_out(input);
  const DType dtype = dtype_of(input, "input");
  const Context context(input);
  check(is_on(grad_output, context.device()), "grad_output", "it on the device of input", "another device");
  const Tensor grads = laid_out_like(grad_output, laid);
  const int64_t channels = laid.geometry.channels, width = 2 * channels;
  const ScalarType accumulate = accumulate_type(input.scalar_type());
  const ScalarType parameter = weight ? weight->scalar_type() : accumulate;
  const PerChannel means(mean, channels, "mean", context.device());
  const PerChannel invstds(invstd, channels, "invstd", context.device());
  if (input.numel() == 0) {
    return {torch::stable::new_zeros(input, {&width, 1}, accumulate),
            torch::stable::new_zeros(input, {&channels, 1}, parameter),
            torch::stable::new_zeros(input, {&channels, 1}, parameter)};
  }
  Tensor sums = new_channels(input, width, accumulate);
  Tensor grad_weight = new_channels(input, channels, parameter), grad_bias = new_channels(input, channels, parameter);
  const DType parameter_dtype = dtype_of(grad_weight, "weight");
  TorchWorkspace workspace(input, context);
  check_cuda(backward_reduce(grads.const_data_ptr(), laid.tensor.const_data_ptr(), dtype, laid.geometry, means, invstds,
                             {sums.mutable_data_ptr(),
                              {grad_weight.mutable_data_ptr(), parameter_dtype},
                              {grad_bias.mutable_data_ptr(), parameter_dtype}},
                             workspace, context.stream()));
  return {sums, grad_weight, grad_bias};
}

Tensor batch_norm_backward_elemt(Tensor grad_output, Tensor input, std::optional<Tensor> weight, Tensor mean,
                                 Tensor invstd, Tensor sums, Tensor count) {
  check_same_input(grad_output, input);
  const Context context(input);
  const int32_t device = context.device();
  check(is_on(grad_output, device), "grad_output", "it on the device of input", "another device");
  const int64_t* counts = counter(count, "count", device);
  const Laid laid = lay_out(input);
  const DType dtype = dtype_of(input, "input");
  const int64_t channels = laid.geometry.channels;
  const Tensor grads = laid_out_like(grad_output, laid);
  Tensor grad_input = torch::stable::empty_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(grad_input, laid, input);
  const PerChannel means(mean, channels, "mean", device), invstds(invstd, channels, "invstd", device);
  const PerChannel weights(weight, channels, "weight", device), totals(sums, 2 * channels, "sums", device);
  check_cuda(backward_elemt(grads.const_data_ptr(), laid.tensor.const_data_ptr(), grad_input.mutable_data_ptr(), dtype,
                            laid.geometry, {means, invstds, weights, totals, counts}, context.stream()));
  return with_strides_of(grad_input, laid, input);
}

}  // namespace bagua_syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CUDA, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&bagua_syncbn::cuda::batch_norm_stats));
  m.impl("batch_norm_gather_stats", TORCH_BOX(&bagua_syncbn::cuda::batch_norm_gather_stats));
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cuda::batch_norm_elemt));
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&bagua_syncbn::cuda::batch_norm_backward_reduce));
  m.impl("batch_norm_backward_elemt", TORCH_BOX(&bagua_syncbn::cuda::batch_norm_backward_elemt));
}
