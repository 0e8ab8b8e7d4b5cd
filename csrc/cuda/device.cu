// The CUDA runtime for torch/, which then needs no CUDA headers.

#include <cuda_runtime_api.h>

#include <atomic>

#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Loads the machine code of all kernels. CUDA does that as late as it can, at the first launch of each; and may then
// wait for what runs on the device, such as a collective that waits for other ranks, which may be waiting for this one.
cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel : all_kernels()) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

Support find_support(int32_t device) {
  const Versions here = versions();
  if (here.driver / 1000 < here.runtime / 1000) return Support::kOldDriver;
  int32_t before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  const cudaError_t error = load_kernels();
  cudaSetDevice(before);
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      cudaGetLastError();  // so that it is not reported once more by the next one to look
      return Support::kNoImage;
    default:
      return Support::kRuns;  // any other error is for the op to report
  }
}

}  // namespace

Versions versions() {
  Versions result{0, 0};
  cudaRuntimeGetVersion(&result.runtime);
  cudaDriverGetVersion(&result.driver);
  return result;
}

Support support_of(int32_t device) {
  constexpr int32_t kDevices = 64;
  static std::atomic<int32_t> found[kDevices];  // one more than the Support, 0 as long as it is not known
  if (device < 0 || device >= kDevices) return find_support(device);
  int32_t known = found[device].load(std::memory_order_relaxed);
  if (known == 0) {
    known = static_cast<int32_t>(find_support(device)) + 1;
    found[device].store(known, std::memory_order_relaxed);
  }
  return static_cast<Support>(known - 1);
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
