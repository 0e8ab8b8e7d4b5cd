// The CUDA runtime for torch/, which then needs no CUDA headers.

#include <cuda_runtime_api.h>

#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Loads the machine code of all kernels. By default CUDA loads a kernel at its first launch, and may then wait for what
// runs on the device. That may be a collective that waits for other ranks, which wait for this one.
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

void set_device(int32_t device) {
  expect_success(cudaSetDevice(device));
}

StreamState state_of(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  // The legacy stream cannot be captured; asking about it is an error while a stream that it waits for is.
  if (stream != nullptr && stream != cudaStreamLegacy) expect_success(cudaStreamIsCapturing(stream, &status));
  expect_success(cudaStreamGetId(stream, &id));
  return {status != cudaStreamCaptureStatusNone, id};
}

uint32_t* make_tickets(Stream stream) {
  void* memory = nullptr;
  // Another thread may be capturing a graph, which by default forbids allocations to all threads.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  expect_success(cudaThreadExchangeStreamCaptureMode(&mode));
  cudaError_t error = cudaMalloc(&memory, kTickets * sizeof(uint32_t));
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, kTickets * sizeof(uint32_t), stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaErrorMemoryAllocation) expect_success(error);
  cudaGetLastError();
  return static_cast<uint32_t*>(memory);
}

}  // namespace bagua_syncbn::cuda
