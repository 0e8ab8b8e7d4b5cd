// Asks torch for the device and the stream that an op runs on.
#include "context.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>

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

std::atomic<bool> turned_off{false};

Support find_support(int32_t device) {
  if (turned_off.load(std::memory_order_relaxed)) return Support::kTurnedOff;
  if (!driver_will_do()) return Support::kOldDriver;
  // torch's, which gives a thread the device back that it had, and makes no context where it had none.
  const torch::stable::accelerator::DeviceGuard guard(device);
  return load_kernels(device);
}

}  // namespace

void turn_off() {
  turned_off.store(true, std::memory_order_relaxed);
}

Support support_of(int32_t device) {
  constexpr int32_t kDevices = 64;
  static std::atomic<int32_t> found[kDevices];  // one more than the Support, 0 as long as it is not known
  if (device < 0 || device >= kDevices) return find_support(device);
  int32_t known = found[device].load(std::memory_order_relaxed);
  if (known == 0) {
    known = static_cast<int32_t>(find_support(device)) + 1;
    found[device].store(known, std::memory_order_relaxed);
  }
  return static_cast<Support>(known - 1);
}

Context::Context(const Tensor& input) : device_(input.get_device_index()), guard_(device_) {
  static const StreamGetter getter = find_stream_getter();
  check(getter != nullptr, "input", "a torch with CUDA", "one without");
  check_cuda(set_device(device_));
  void* stream = nullptr;
  check(getter(device_, &stream) == 0, "input", "it on a device with a current stream", device_);
  stream_ = static_cast<Stream>(stream);
}

bool Context::capturing() const {
  bool result = false;
  check_cuda(is_capturing(stream_, result));
  return result;
}

uint64_t Context::stream_id() const {
  uint64_t result = 0;
  check_cuda(cuda::stream_id(stream_, result));
  return result;
}

}  // namespace bagua_syncbn::cuda
