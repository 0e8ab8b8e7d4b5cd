// Arguments of the kernels: plain memory instead of tensors.
#pragma once

#include <cstdint>

#include "activations.h"
#include "dtypes.h"
#include "host_device.h"
#include "packed_stats.h"

namespace bagua_syncbn {

// Sizes and memory layout of a tensor. Tensors with other layouts are copied first.
//
// Planar, (batch, channels, inner): the `inner` values of a sample and channel are contiguous.
// Interleaved, (batch * inner, channels): the channels of a position are contiguous, as in channels_last and (N, C).
struct Geometry {
  bool interleaved;
  int64_t batch;
  int64_t channels;
  int64_t inner;

  int64_t rows() const { return batch * inner; }  // values per channel
};

// A per-channel tensor of any dtype. `data` is null for None.
struct PerChannel {
  const void* data = nullptr;
  DType dtype = DType::kFloat;
};

// A per-channel output.
struct MutablePerChannel {
  void* data = nullptr;
  DType dtype = DType::kFloat;

  BAGUA_SYNCBN_HOST_DEVICE operator PerChannel() const { return {data, dtype}; }
};

struct GatherArguments {
  const void* gathered;  // the ranks' rows, or (summed) the sum over ranks: see packed_stats.h
  int64_t ranks;
  int64_t channels;
  DType accumulate;  // dtype of mean, invstd and rows
  void* mean;
  void* invstd;
  int64_t* count;
  MutablePerChannel running_mean;  // null if running_var is null
  MutablePerChannel running_var;
  int64_t* batches;  // num_batches_tracked; may be null
  bool averages;     // cumulative average: the momentum is 1 / batches
  double momentum;
  double eps;
  int64_t header_size;
  bool skip_nonfinite;
  int64_t* fault;  // in host memory; may be null
  bool summed;
  int64_t message_number;
};

// Operations after the normalization.
struct Epilogue {
  const void* residual = nullptr;  // added before the activation; may be null
  int64_t activation = 0;          // a Code
  double parameter = 0;            // of LeakyRelu and Elu
};

// `weight` and `bias` may be null. In backward, `bias` is only needed with an activation; so is `weight` in
// backward_reduce.
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
  const void* sums;      // 2 * channels + header_size values of the accumulate dtype
  const int64_t* count;  // on the device
  int64_t header_size;
  int64_t ranks;
  int64_t message_number;
  int64_t* fault;  // in host memory; may be null
};

// Declares the ops for a namespace's Device. Per-channel tensors are contiguous. `mask`: a byte for each position, 0 if
// it is invalid; null if all are valid. The input of stats and backward_reduce may be empty.
//
// `packed`: the message to other ranks, see packed_stats.h. `grad_buffer` receives g = dy * act'(z), unless it is null.
//
// backward_elemt supports no residual, and a mask only without an activation. `dx` may be `dy`. At invalid positions,
// `dx` is dy * invstd * weight.
#define BAGUA_SYNCBN_DECLARE_OPS                                                                                      \
  void stats(const void* x, DType, const Geometry&, const uint8_t* mask, void* packed, const Header&, Device&);       \
  void gather_stats(const GatherArguments&, Device&);                                                                 \
  void elemt(const void* x, void* y, DType, const Geometry&, const Factors&, const Epilogue&, Device&);               \
  void backward_reduce(const void* dy, const void* x, void* grad_buffer, DType, const Geometry&,                      \
                       const BackwardReduceArguments&, const Epilogue&, Device&);                                     \
  void backward_elemt(const void* dy, const void* x, void* dx, DType, const Geometry&, const BackwardElemtArguments&, \
                      const uint8_t* mask, const Epilogue&, Device&);

}  // namespace bagua_syncbn
