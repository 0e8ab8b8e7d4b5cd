// Where an op runs: the device of its input, the stream that torch uses there, and memory from torch's allocator.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../../allocate.h"
#include "../kernels.h"

namespace bagua_syncbn::cuda {

// Makes the device of `input` current as long as it lives, for torch and for the CUDA runtime in this library. Its
// memory is freed on the host while the kernel may still be running; the allocator gives it out again for later work on
// the same stream only.
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
