// The CUDA runtime functions that csrc/cuda/check.cu uses, for the emulator.

#include <cuda_runtime_api.h>

#include <cstdlib>

cudaError_t cudaMallocHost(void** memory, size_t size) {
  *memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error";
}
