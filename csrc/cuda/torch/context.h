// Where an op runs: the device of its input, the stream that torch uses there, and memory from torch's allocator.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../../stable_abi.h"
#include "../kernels.h"

namespace bagua_syncbn::cuda {

// Makes the device of `input` current as long as it lives, for torch and for the CUDA runtime in this library. Its
// memory is freed on the host while the kernel may still be running; the allocator gives it out again for later work on
// the same stream only.
class Context final : public Device {
 public:
  explicit Context(const Tensor& input);

  double* partials(int64_t count) override;
  uint32_t* tickets() override;

 private:
  StreamState state() const;

  const Tensor& input_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<Tensor> partials_, tickets_;
};

}  // namespace bagua_syncbn::cuda
