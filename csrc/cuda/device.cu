// Calls of the CUDA runtime for torch/, which needs no CUDA headers.

#include <cuda_runtime_api.h>

#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Loads the machine code of all kernels. By default CUDA loads a kernel at its first launch, and can then wait for
// running work. This could deadlock: a running collective can wait for other ranks, which wait for this one.
cudaError_t load_all() {
  cudaFuncAttributes attributes;
  for (const void* kernel : all_kernels()) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

Support load_kernels(int32_t device) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = load_all();
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      cudaGetLastError();  // clears the error, so that torch does not report it too
      return Support::kNoImage;
    default:
      return Support::kRuns;  // the op reports any other error
  }
}

Versions versions() {
  Versions result{0, 0};
  cudaRuntimeGetVersion(&result.runtime);
  cudaDriverGetVersion(&result.driver);
  return result;
}

void set_device(int32_t device) {
  expect_success(cudaSetDevice(device));
}

}  // namespace bagua_syncbn::cuda
