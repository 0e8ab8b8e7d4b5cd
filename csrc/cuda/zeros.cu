// The message of a rank without values: zeros, which weigh nothing, and its words.

#include "../packed_stats.h"
#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename A>
__global__ void __launch_bounds__(kThreads) write_zeros(A* target, int64_t zeros, const Words words) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < zeros) target[i] = A(0);
  if (i == 0) pack_words(target + zeros, words);
}

template <typename A>
const char* launch_zeros(void* target, int64_t zeros, const Words& words, Stream stream) {
  const Extent grid{ceil_div(zeros + 1, kThreads), 1};
  return Kernel<write_zeros<A>>::launch(grid, {kThreads, 1}, stream, target, zeros, words);
}

}  // namespace

const char* zeros_and(const Words& words, void* target, int64_t zeros, DType accumulate, Stream stream) {
  return accumulate == DType::kDouble ? launch_zeros<double>(target, zeros, words, stream)
                                      : launch_zeros<float>(target, zeros, words, stream);
}

}  // namespace bagua_syncbn::cuda
