// CUDA runtime calls for torch/, which includes no CUDA headers.

#include "launch.cuh"

namespace bagua_syncbn::cuda {

// By default CUDA loads a kernel at its first launch, and may then wait for running work. This could deadlock: a
// running collective may wait for other ranks, which wait for this one.
Support load_kernels(int32_t device) {
  cudaError_t error = cudaSetDevice(device);
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  cudaGetLastError();  // clears the error, so that torch does not also report it
  if (error == cudaErrorInsufficientDriver) return Support::kOldDriver;
  const auto no_image = {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction, cudaErrorInvalidKernelImage,
                         cudaErrorUnsupportedPtxVersion, cudaErrorJitCompilerNotFound};
  if (std::find(no_image.begin(), no_image.end(), error) != no_image.end()) return Support::kNoImage;
  expect_success(error);
  return Support::kRuns;
}

void set_device(int32_t device) {
  expect_success(cudaSetDevice(device));
}

}  // namespace bagua_syncbn::cuda
