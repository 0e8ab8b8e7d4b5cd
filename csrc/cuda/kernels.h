// The ops on plain device memory: what torch/register.cpp calls and the .cu files define. No torch here.
//
// Each op launches one kernel and returns, or raises std::runtime_error. Tensors are in one of the two layouts of
// layout.h and not empty; per-channel tensors are contiguous.
#pragma once

#include <cstdint>

#include "../arguments.h"

struct CUstream_st;

namespace bagua_syncbn::cuda {

using Stream = CUstream_st*;

// Makes `device` current for the CUDA runtime in this library, which is not the one in torch's.
void set_device(int32_t device);

// Whether the kernels in this library run on a device, and if not, why: the driver is older than the CUDA runtime that
// the library was built with; there is no machine code for the device, nor any that the driver can compile for it; or
// they were turned off.
enum class Support : int32_t { kRuns, kOldDriver, kNoImage, kTurnedOff };
Support support_of(int32_t device);
// Has ATen's kernels compute on a device, or on all if it is -1.
void turn_off(int32_t device);

// Loads the machine code of all kernels on `device`, and makes it current: kRuns or kNoImage.
Support load_kernels(int32_t device);

// Versions of CUDA, as 1000 * major + 10 * minor: what the library was built with, and what the driver is for (0: no
// driver).
struct Versions {
  int32_t runtime;
  int32_t driver;
};
Versions versions();

// Where an op runs.
class Device {
 public:
  Stream stream = nullptr;
  // Returns memory for `count` doubles, uninitialized, for the kernels that this call launches on the stream.
  virtual double* allocate(int64_t count) = 0;

 protected:
  ~Device() = default;
};

// `packed`: 2 * channels + 2 + words values of the accumulate dtype, see packed_stats.h. `mask`, in memory of the
// device, says which positions count; null: all do.
void stats(const void* x, DType dtype, const Geometry& g, const Mask* mask, void* packed, const Words& words,
           Device& device);

// Writes `zeros` of them and then the words, of the accumulate dtype: what a rank without values sends in either pass.
void zeros_and(const Words& words, void* target, int64_t zeros, DType accumulate, Device& device);

void gather_stats(const GatherArguments& arguments, Device& device);

void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors, const Epilogue& epilogue,
           Device& device);

// `grad` gets g = dy * act'(z), unless it is null.
void backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device& device);

// Without a residual. `dx` may be `dy`. `mask`: as for `stats`, and without an activation; where a position does not
// count, `dx` is dy * invstd * weight.
void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const Mask* mask, const Epilogue& epilogue,
                    Device& device);

}  // namespace bagua_syncbn::cuda
