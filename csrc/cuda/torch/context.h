// Where an op runs: the device of its input and the stream that torch uses there.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../../stable_abi.h"
#include "../kernels.h"

namespace bagua_syncbn::cuda {

inline void check_cuda(const char* error) {
  check(error == nullptr, "CUDA", "success", error == nullptr ? "" : error);
}

// Makes the device of `input` current as long as it lives, for torch and for the CUDA runtime in this library.
class Context {
 public:
  explicit Context(const Tensor& input);

  int32_t device() const { return device_; }
  Stream stream() const { return stream_; }
  // Whether work on the stream is being recorded into a graph.
  bool capturing() const;
  uint64_t stream_id() const;

 private:
  int32_t device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  Stream stream_ = nullptr;
};

}  // namespace bagua_syncbn::cuda
