// The only place that launches kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "kernels.h"

namespace bagua_syncbn::cuda {

// Threads of a block at most, and of a warp.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Launches `kernel`; returns nullptr, or what went wrong. The check catches what the launch itself can report, and does
// not wait for the kernel.
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, Stream stream,
                   std::common_type_t<Parameters>... arguments) {
  if (blocks > INT32_MAX) return "more channels than a grid has blocks";
#if defined(BAGUA_SYNCBN_EMULATOR)
  return emulator::launch(static_cast<unsigned>(blocks), threads, [=] { kernel(arguments...); });
#else
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                                             threads, pointers, 0, stream);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // so that it is not reported once more by the next one to look
  return cudaGetErrorString(error);
#endif
}

}  // namespace bagua_syncbn::cuda
