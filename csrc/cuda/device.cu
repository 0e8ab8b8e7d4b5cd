// The CUDA runtime for torch/, which then needs no CUDA headers.

#include <cuda_runtime_api.h>

#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Loads the machine code of all kernels. CUDA does that as late as it can, at the first launch of each; and may then
// wait for what runs on the device, such as a collective that waits for other ranks, which may be waiting for this one.
cudaError_t load_all() {
  cudaFuncAttributes attributes;
  for (const void* kernel : all_kernels()) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

bool driver_will_do() {
  const Versions here = versions();
  return here.driver / 1000 >= here.runtime / 1000;
}

Support load_kernels(int32_t device) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = load_all();
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      cudaGetLastError();  // clears it, so that torch does not report it again
      return Support::kNoImage;
    default:
      return Support::kRuns;  // any other error is for the op to report
  }
}

Versions versions() {
  Versions result{0, 0};
  cudaRuntimeGetVersion(&result.runtime);
  cudaDriverGetVersion(&result.driver);
  return result;
}

const char* set_device(int32_t device) {
  const cudaError_t error = cudaSetDevice(device);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* is_capturing(Stream stream, bool& result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  result = status != cudaStreamCaptureStatusNone;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* stream_id(Stream stream, uint64_t& result) {
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetId(stream, &id);
  result = id;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace bagua_syncbn::cuda
