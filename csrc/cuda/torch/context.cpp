// Gets an op's device and stream from torch.
#include "context.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>

namespace bagua_syncbn::cuda {
namespace {

using StreamGetter = AOTITorchError (*)(int32_t device, void** stream);

// Returns null in a CPU build of torch. This library must load there too, so it is not linked with libtorch_cuda.
// RTLD_NOLOAD finds only the copy that torch itself uses.
StreamGetter find_stream_getter() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<StreamGetter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
}

// Whether a device's kernels are loaded. The size is torch's device limit.
constexpr int32_t kDevices = 128;
std::atomic<bool> loaded[kDevices];

}  // namespace

Support support_of(int32_t device) {
  check(device >= 0 && device < kDevices, "device", "an index from 0 to 127", device);
  if (loaded[device].load(std::memory_order_relaxed)) return Support::kRuns;
  // torch's guard restores the device of the thread, and creates no context if there was none.
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Support support = load_kernels(device);
  loaded[device].store(support == Support::kRuns);
  return support;
}

Context::Context(const Tensor& input) : input_(input), guard_(input.get_device_index()) {
  static const StreamGetter getter = find_stream_getter();
  const int32_t device = input.get_device_index();
  // Eager calls switch to ATen's kernels before this raises: bagua_syncbn/_cuda/selection.py.
  check(getter != nullptr && support_of(device) == Support::kRuns, "input",
        "a GPU and a driver that run these kernels (an eager first call selects others)", device_name(input));
  set_device(device);
  void* current = nullptr;
  check(getter(device, &current) == 0, "input", "a device with a current stream", device);
  stream = static_cast<Stream>(current);
}

}  // namespace bagua_syncbn::cuda
