// Chooses kernels and launches them. The only place with a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "traits.cuh"

namespace bagua_syncbn::cuda {

inline void expect(bool success, const char* problem) {
  if (!success) throw std::runtime_error(std::string("CUDA: expected success, got ") + problem);
}

inline void expect_success(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that torch does not report it too
  expect(false, cudaGetErrorString(error));
}

// All kernels of the library, to load them before the first one runs (device.cu).
inline std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

template <auto kKernel>
struct Kernel;
template <typename... Parameters, void (*kKernel)(Parameters...)>
struct Kernel<kKernel> {
  // Adds the kernel to all_kernels() when the library is loaded.
  static inline const bool known = (all_kernels().push_back(reinterpret_cast<const void*>(kKernel)), true);

  // Launches the kernel with `arguments`, converted to its parameters. Raises errors of the launch; does not wait for
  // the kernel.
  template <typename... Arguments>
  static void launch(const Extent& grid, const Extent& block, Stream stream, const Arguments&... arguments) {
    static_cast<void>(&known);  // instantiates it
    expect(grid.x <= INT32_MAX, "more channels than a grid has blocks");
    const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
    const dim3 threads(static_cast<unsigned>(block.x), static_cast<unsigned>(block.y));
    run(blocks, threads, stream, static_cast<Parameters>(arguments)...);
  }

 private:
  static void run(dim3 blocks, dim3 threads, Stream stream, Parameters... arguments) {
#if defined(BAGUA_SYNCBN_EMULATOR)
    const char* problem = emulator::launch(__PRETTY_FUNCTION__, blocks, threads, [=] { kKernel(arguments...); });
    expect(problem == nullptr, problem);
#else
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    expect_success(cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), blocks, threads, pointers, 0, stream));
#endif
  }
};

// Calls `start(traits, plan)` with the Traits and the plan of the kernel for the layout of `tensor`.
template <Op kOp, typename T, int kWidth, bool kMasked, bool kActivates, typename Start>
void choose_layout(const Geometry& g, const void* tensor, const Start& start) {
  const char* const too_large = "more than 2^30 values in a row, slots of a channel, or rows in a part of it";
  using Interleaves = Traits<kOp, T, kWidth, Interleaved, kMasked, kActivates>;
  if (g.interleaved) {
    const Interleaved plan = split_interleaved(g, kWidth, Interleaves::kReduces);
    expect(fits(plan), too_large);
    return start(Interleaves(), plan);
  }
  const auto misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(tensor) / sizeof(T) % kWidth);
  const Planar plan = split_planar(g, kWidth, misaligned, Interleaves::kReduces);
  expect(fits(plan), too_large);
  start(Traits<kOp, T, kWidth, Planar, kMasked, kActivates>(), plan);
}

// The same, for the dtype, layout and alignment of `tensors`. All tensors that the kernel reads or writes must be
// included.
template <Op kOp, bool kMasked, bool kActivates, typename Start>
void choose_kernel(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors, const Start& start) {
  dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    const void* first = *tensors.begin();
    if (takes_vectors(g, sizeof(T), tensors)) {
      choose_layout<kOp, T, kVector<T>, kMasked, kActivates>(g, first, start);
    } else {
      choose_layout<kOp, T, 1, kMasked, kActivates>(g, first, start);
    }
  });
}

}  // namespace bagua_syncbn::cuda
