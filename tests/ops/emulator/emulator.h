// Runs CUDA kernels on the CPU, for tests: the parts of CUDA that csrc/cuda uses, in plain C++.
//
// Threads are fibers. Blocks, the warps of a block and the threads of a warp run one by one in random order: a thread
// until it waits at a barrier or, in a shuffle, for the other lanes of the mask; a warp until all its threads wait.
// Errors that are rare on a GPU are common here: a barrier or shuffle that not all threads reach, a shuffle from
// outside its mask or with different masks. A missing barrier causes wrong results. Races between two waits are not
// detected.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define BAGUA_SYNCBN_IN_EMULATOR
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace emulator {

// The running thread.
struct Place {
  uint3 thread;
  uint3 block;
};
extern Place place;
extern dim3 grid_size, block_size;

// A fault record, and its values at the last fence.
extern "C" const int64_t* watched;
extern "C" int64_t at_fence[8];

// Runs `kernel`. Returns nullptr, or a description of a thread's error.
const char* launch(const char* name, dim3 blocks, dim3 threads, const std::function<void()>& kernel);

void wait_at_barrier();

// Returns the bits of the lane `distance` lanes later; its own bits if there is none.
uint64_t shuffle_down(unsigned mask, uint64_t bits, int distance);

}  // namespace emulator

#define threadIdx emulator::place.thread
#define blockIdx emulator::place.block
#define gridDim emulator::grid_size
#define blockDim emulator::block_size

using std::erfc;
using std::exp;
using std::expm1;
using std::isfinite;
using std::max;
using std::min;
using std::tanh;

inline void __syncthreads() {
  emulator::wait_at_barrier();
}
inline int __syncthreads_and(int holds) {
  static int failures = 0;
  failures += holds == 0;
  __syncthreads();
  const bool all = failures == 0;
  __syncthreads();
  failures = 0;
  __syncthreads();
  return all;
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}

template <typename T>
T __ldcs(const T* address) {
  return *address;
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulator::shuffle_down(mask, bits, distance);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return __shfl_down_sync(mask, value, lane - static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) % 32);
}

inline void __threadfence_system() {
  if (emulator::watched != nullptr) std::memcpy(emulator::at_fence, emulator::watched, sizeof(emulator::at_fence));
}
inline int __popc(unsigned value) {
  return __builtin_popcount(value);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t(a) * b >> 32);
}
