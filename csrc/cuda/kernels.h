// The ops on plain device memory, without torch: called by ../ops.h, defined in the .cu files.
//
// Each op launches one or two kernels and returns, or raises std::runtime_error.
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

// Makes `device` current and loads all kernels. Raises errors that may not recur, such as too little memory.
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

BAGUA_SYNCBN_DECLARE_OPS

}  // namespace bagua_syncbn::cuda
