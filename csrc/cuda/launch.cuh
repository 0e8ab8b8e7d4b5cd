// Chooses and launches kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <vector>

#include "batch.cuh"
#include "kernels.h"

namespace bagua_syncbn::cuda {

inline void expect_success(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // clears the error, so that torch does not also report it
  expect(error == cudaSuccess, cudaGetErrorString(error));
}

// All kernels of the library. load_kernels() loads them before the first launch.
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

  // Launches the kernel with `arguments`, converted to its parameter types. Raises launch errors; does not wait for the
  // kernel.
  template <typename... Arguments>
  static void launch(dim3 grid, dim3 block, Stream stream, const Arguments&... arguments) {
    static_cast<void>(&known);  // forces its instantiation
    run(grid, block, stream, static_cast<Parameters>(arguments)...);
  }

 private:
  static void run(dim3 grid, dim3 block, Stream stream, Parameters... arguments) {
#if defined(BAGUA_SYNCBN_EMULATOR)
    const char* problem = emulator::launch(__PRETTY_FUNCTION__, grid, block, [=] { kKernel(arguments...); });
    expect(problem == nullptr, problem);
#else
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    expect_success(cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), grid, block, pointers, 0, stream));
#endif
  }
};

// Calls start(traits, plan) for the dtype, layout and alignment of `tensors`: all tensors that the kernel reads or
// writes.
template <Op kOp, bool kMasked, bool kActivates, typename Start>
void choose_kernel(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors, const Start& start) {
  const auto choose_layout = [&](auto value, auto width) {
    using T = decltype(value);
    constexpr int kWidth = decltype(width)::value;
    using Rows = Traits<kOp, T, kWidth, Interleaved, kMasked, kActivates>;
    if (g.interleaved) return start(Rows(), split_interleaved(g, kWidth, Rows::kReduces));
    const auto misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(*tensors.begin()) / sizeof(T) % kWidth);
    start(Traits<kOp, T, kWidth, Planar, kMasked, kActivates>(), split_planar(g, kWidth, misaligned, Rows::kReduces));
  };
  dispatch(dtype, [&](auto value) {
    constexpr int kSize = sizeof(value);
    if (!takes_vectors(g, kSize, tensors)) return choose_layout(value, std::integral_constant<int, 1>());
    choose_layout(value, std::integral_constant<int, kVectorBytes / kSize>());
  });
}

}  // namespace bagua_syncbn::cuda
