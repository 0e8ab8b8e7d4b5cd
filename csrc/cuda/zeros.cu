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

}  // namespace

const char* zeros_and(const Words& words, void* target, int64_t zeros, DType accumulate, Stream stream) {
  return dispatch(accumulate, [&](auto value) {
    using Write = Kernel<write_zeros<Accumulate<decltype(value)>>>;
    return Write::launch({ceil_div(zeros + 1, kThreads), 1}, {kThreads, 1}, stream, target, zeros, words);
  });
}

}  // namespace bagua_syncbn::cuda
