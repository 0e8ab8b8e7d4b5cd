// What context.cpp needs of the CUDA runtime, so that it needs no CUDA headers.

#include "launch.cuh"

namespace bagua_syncbn::cuda {

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
