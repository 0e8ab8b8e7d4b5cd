// The ops on plain device memory, without torch: declared for torch/register.cpp, defined in the .cu files.
//
// Each op launches one or two kernels and returns, or raises std::runtime_error. Tensors are in one of the two layouts
// of layout.h and not empty; per-channel tensors are contiguous.
#pragma once

#include <cstdint>

#include "../arguments.h"

struct CUstream_st;

namespace bagua_syncbn::cuda {

using Stream = CUstream_st*;

// Makes `device` current for the CUDA runtime of this library, which is not torch's.
void set_device(int32_t device);

// Whether the kernels run on a device. If not: the driver is older than the CUDA runtime that the library was built
// with; the library has neither machine code for the device nor code that the driver can compile for it; or the kernels
// were turned off.
enum class Support : int32_t { kRuns, kOldDriver, kNoImage, kTurnedOff };
Support support_of(int32_t device);
// Switches to ATen's kernels on a device, or on all devices if `device` is -1.
void turn_off(int32_t device);

// Makes `device` current and loads the machine code of all kernels. Returns kRuns or kNoImage.
Support load_kernels(int32_t device);

// CUDA versions, as 1000 * major + 10 * minor: of the runtime that the library was built with, and of the driver (0: no
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

// `packed`: 2 * channels + 2 + header.size values of the accumulate dtype, see packed_stats.h. `mask` selects the valid
// positions and is in device memory; null: all are valid.
void stats(const void* x, DType dtype, const Geometry& g, const Mask* mask, void* packed, const Header& header,
           Device& device);

// Writes `zeros` zeros and then the header, in the accumulate dtype: the message of a rank without values, in either
// pass.
void write_zeros_and_header(const Header& header, void* target, int64_t zeros, DType accumulate, Device& device);

void gather_stats(const GatherArguments& arguments, Device& device);

void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors, const Epilogue& epilogue,
           Device& device);

// `grad_buffer` receives g = dy * act'(z), unless it is null.
void backward_reduce(const void* dy, const void* x, void* grad_buffer, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device& device);

// Takes no residual. `dx` may be `dy`. `mask`: as for `stats`, only without an activation; at invalid positions, `dx`
// is dy * invstd * weight.
void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const Mask* mask, const Epilogue& epilogue,
                    Device& device);

}  // namespace bagua_syncbn::cuda
