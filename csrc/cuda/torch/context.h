// The device of an op, torch's current stream there, and memory from torch's allocator.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../../allocate.h"
#include "../kernels.h"

namespace bagua_syncbn::cuda {

// Makes the device of `input` current during its lifetime, for torch and for this library's CUDA runtime. Frees memory
// while kernels may still be running. This is safe, because the allocator reuses it only for later work on the same
// stream.
class Context final : public Device {
 public:
  explicit Context(const Tensor& input);

  double* allocate(int64_t count) override {
    memory_ = allocate_vector(count, ScalarType::Double, input_);
    return static_cast<double*>(memory_->mutable_data_ptr());
  }

 private:
  const Tensor& input_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<Tensor> memory_;
};

}  // namespace bagua_syncbn::cuda
