// Arguments of the ops on plain memory, which ops.h passes to the kernels of a device.
#pragma once

#include <cstdint>

#include "activations.h"
#include "dtypes.h"
#include "host_device.h"
#include "layout.h"
#include "packed_stats.h"

namespace bagua_syncbn {

// A per-channel tensor of any dtype. `data` is null for optional tensors that are not given.
struct PerChannel {
  const void* data = nullptr;
  DType dtype = DType::kFloat;
};

// A per-channel tensor that the op writes.
struct MutablePerChannel {
  void* data = nullptr;
  DType dtype = DType::kFloat;

  BAGUA_SYNCBN_HOST_DEVICE operator PerChannel() const { return {data, dtype}; }
};

struct GatherArguments {
  const void* gathered;  // rows of all ranks; or their sums (is_sum), in double: see packed_stats.h
  int64_t ranks;
  int64_t channels;
  DType accumulate;  // of mean and invstd, and of rows
  void* mean;
  void* invstd;
  int64_t* count;
  MutablePerChannel running_mean;  // null if running_var is
  MutablePerChannel running_var;
  int64_t* batches;  // null if batches are not counted
  bool averages;     // cumulative average: 1 / batches is used instead of `momentum`
  double momentum;
  double eps;
  int64_t header_size;
  bool skip_nonfinite;
  int64_t* fault;  // in host memory; may be null
  bool is_sum;
  int64_t call;
};

// What follows the normalization.
struct Epilogue {
  const void* residual = nullptr;  // added before the activation; may be null
  Act<double> act{};
};

// `weight` and `bias` may be null. In the backward pass, `bias` and (in backward_reduce) `weight` are only read for an
// activation.
struct Factors {
  PerChannel mean;
  PerChannel invstd;
  PerChannel weight;
  PerChannel bias;
};

struct BackwardReduceArguments {
  Factors factors;
  void* sums;  // 2 * channels + header.size values of the accumulate dtype
  MutablePerChannel grad_weight;
  MutablePerChannel grad_bias;
  Header header;
};

struct BackwardElemtArguments {
  Factors factors;
  PerChannel sums;       // 2 * channels + header_size values
  const int64_t* count;  // on the device
  int64_t header_size;
  int64_t ranks;
  int64_t call;
  int64_t* fault;  // in host memory; may be null
};

}  // namespace bagua_syncbn
