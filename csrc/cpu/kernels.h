// The ops on plain memory of the CPU, with the arguments that cuda/kernels.h describes.
#pragma once

#include "../arguments.h"
#include "../stable_abi.h"

namespace bagua_syncbn::cpu {

struct Kernels {
  explicit Kernels(const Tensor&) {}

  static void stats(const void* x, DType dtype, const Geometry& g, const Mask* mask, void* packed, const Words& words);
  static void zeros_and(const Words& words, void* target, int64_t zeros, DType accumulate);
  static void gather_stats(const GatherArguments& arguments);
  static void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors,
                    const Options& options);
  static void backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                              const BackwardReduceArguments& arguments, const Options& options);
  static void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                             const BackwardElemtArguments& arguments, const Mask* mask, const Options& options);
};

}  // namespace bagua_syncbn::cpu
