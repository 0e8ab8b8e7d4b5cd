// The ops on plain device memory, without torch: called by ../ops.h, defined in the .cu files.
//
// Each op launches one or two kernels and returns, or raises std::runtime_error. Per-channel tensors are contiguous.
#pragma once

#include <cstdint>

#include "../arguments.h"

struct CUstream_st;

namespace bagua_syncbn::cuda {

using Stream = CUstream_st*;

// Makes `device` current for this library's CUDA runtime, which is separate from torch's.
void set_device(int32_t device);

// Whether the kernels run on a device. kOldDriver: the driver is older than the library's CUDA runtime. kNoImage: the
// library has no machine code for the device, and no PTX that the driver can compile for it.
enum class Support : int32_t { kRuns, kOldDriver, kNoImage };
Support support_of(int32_t device);

// Makes `device` current and loads all kernels.
Support load_kernels(int32_t device);

// The stream of an op, and an allocator.
class Device {
 public:
  Stream stream = nullptr;
  // Returns uninitialized memory for `count` doubles, valid until the kernels of this op end.
  virtual double* allocate(int64_t count) = 0;

 protected:
  ~Device() = default;
};

// `packed`: the message to other ranks, see packed_stats.h. `mask`: a byte for each position, 1 if it is valid, else 0;
// null if all are valid. The input may be empty.
void stats(const void* x, DType dtype, const Geometry& g, const uint8_t* mask, void* packed, const Header& header,
           Device& device);

void gather_stats(const GatherArguments& arguments, Device& device);

void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors, const Epilogue& epilogue,
           Device& device);

// `grad_buffer` receives g = dy * act'(z), unless it is null. The input may be empty.
void backward_reduce(const void* dy, const void* x, void* grad_buffer, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device& device);

// Supports no residual, and a mask only without an activation. `dx` may be `dy`. At invalid positions, `dx` is
// dy * invstd * weight.
void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const uint8_t* mask, const Epilogue& epilogue,
                    Device& device);

}  // namespace bagua_syncbn::cuda
