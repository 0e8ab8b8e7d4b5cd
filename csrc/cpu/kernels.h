// The ops on plain CPU memory. cuda/kernels.h describes the arguments.
#pragma once

#include "../arguments.h"
#include "../stable_abi.h"

namespace bagua_syncbn::cpu {

// Unused; CUDA's Device has a stream.
struct Device {
  explicit Device(const Tensor&) {}
};

void stats(const void* x, DType dtype, const Geometry& g, const uint8_t* mask, void* packed, const Header& header,
           Device&);
void gather_stats(const GatherArguments& arguments, Device&);
void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors, const Epilogue& epilogue,
           Device&);
void backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device&);
void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const uint8_t* mask, const Epilogue& epilogue, Device&);
}  // namespace bagua_syncbn::cpu
