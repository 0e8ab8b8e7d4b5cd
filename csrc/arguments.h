// Arguments of the ops on plain memory, as ops.h gives them to the kernels of any device.
#pragma once

#include <cstdint>

#include "activations.h"
#include "dtypes.h"
#include "host_device.h"
#include "layout.h"
#include "packed_stats.h"

namespace bagua_syncbn {

// One value for each channel, of any dtype; `data` may be null where the op says so.
struct PerChannel {
  const void* data = nullptr;
  DType dtype = DType::kFloat;
};

// One that the op writes.
struct MutablePerChannel {
  void* data = nullptr;
  DType dtype = DType::kFloat;

  BAGUA_SYNCBN_HOST_DEVICE operator PerChannel() const { return {data, dtype}; }
};

// `accumulate` is the accumulate dtype. `running_mean` and `running_var`: both null, or neither. `batches` may
// be null unless `averages`, which means a factor of 1 / batches in place of `momentum`. `fault` may be null, and is in
// the memory of the host.
struct GatherArguments {
  const void* gathered;  // (ranks, 2 * channels + 2 + words); or, in double, what `ranks` have added up
  int64_t ranks;
  int64_t channels;
  DType accumulate;
  void* mean;
  void* invstd;
  int64_t* count;
  MutablePerChannel running_mean;
  MutablePerChannel running_var;
  int64_t* batches;
  bool averages;
  double momentum;
  double eps;
  int64_t words;
  bool skip_nonfinite;
  int64_t* fault;
  bool is_sum;
  int64_t call;
};

// The end of the three ops below: `residual`, added before the activation, or null; and the activation.
struct Epilogue {
  const void* residual = nullptr;
  Act<double> act{};
};

// The factors of the three ops below, of any dtype; `weight` and `bias` may be null. Backward reads `bias` for an
// activation only, and backward_reduce `weight`.
struct Factors {
  PerChannel mean;
  PerChannel invstd;
  PerChannel weight;
  PerChannel bias;
};

// `sums`: 2 * channels + words values of the accumulate dtype.
struct BackwardReduceArguments {
  Factors factors;
  void* sums;
  MutablePerChannel grad_weight;
  MutablePerChannel grad_bias;
  Words words;
};

// `sums` has 2 * channels + words values, `count` is on the device. `fault` as above.
struct BackwardElemtArguments {
  Factors factors;
  PerChannel sums;
  const int64_t* count;
  int64_t words;
  int64_t ranks;
  int64_t call;
  int64_t* fault;
};

}  // namespace bagua_syncbn
