// batch_norm_gather_stats: the statistics of all ranks together, and the running ones.
//
// A thread takes a channel and goes over the ranks twice, in their order and in double, so that all ranks get the same
// bits: neighbouring threads read neighbouring values of a row, and each those of several ranks at once. The counter of
// batches is increased by the first thread. Where others need it, for the average over all batches, there is one block,
// and they read it before a barrier.

#include "../packed_stats.h"
#include "launch.cuh"

namespace bagua_syncbn::cuda {
namespace {

// `running` += factor * (value - running), in double.
__device__ void update_running(const PerChannel& running, int64_t c, double value, double factor) {
  const double old = read_channel<double>(running, c);
  write_channel(running, c, old + factor * (value - old));
}

// Calls `use(row, mean, var)` for each rank in order, with the values of channel c. Those of several ranks are loaded
// before the first is used: there are few threads, and nothing else to do while one waits.
template <typename A, typename Use>
__device__ __forceinline__ void for_each_rank(const GatherArguments& arguments, int64_t c, const Use& use) {
  constexpr int kAhead = 8;
  const int64_t size = packed_size(arguments.channels);
  const A* row = static_cast<const A*>(arguments.gathered);
  for (int64_t left = arguments.ranks; left > 0; left -= kAhead, row += kAhead * size) {
    A means[kAhead], vars[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const bool there = u < left;
      means[u] = there ? row[u * size + c] : A(0);
      vars[u] = there ? row[u * size + arguments.channels + c] : A(0);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u < left) use(row + u * size, static_cast<double>(means[u]), static_cast<double>(vars[u]));
    }
  }
}

template <typename A>
__global__ void __launch_bounds__(kThreads) merge_ranks(const GatherArguments arguments) {
  const A* gathered = static_cast<const A*>(arguments.gathered);
  const int64_t channels = arguments.channels, size = packed_size(channels);
  int64_t total = 0;
  for (int64_t r = 0; r < arguments.ranks; ++r) total += unpack_count(gathered + r * size, channels);
  const double inverse = 1.0 / static_cast<double>(total > 0 ? total : 1);
  const auto share = [&](const A* row) { return static_cast<double>(unpack_count(row, channels)) * inverse; };

  const bool updates = total >= 2;  // else there is no unbiased variance
  double factor = arguments.momentum;
  if (arguments.averages) {
    factor = 1.0 / static_cast<double>(max(*arguments.batches + 1, int64_t(1)));
    __syncthreads();  // all have read it
  }
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  if (first && updates && arguments.batches != nullptr) ++*arguments.batches;
  if (first) *arguments.count = total;

  for (int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; c < channels; c += gridDim.x * blockDim.x) {
    double mean = 0, var = 0;
    for_each_rank<A>(arguments, c, [&](const A* row, double own, double) { mean += share(row) * own; });
    for_each_rank<A>(arguments, c, [&](const A* row, double own, double own_var) {
      const double difference = own - mean;
      var += share(row) * (own_var + difference * difference);
    });
    static_cast<A*>(arguments.mean)[c] = static_cast<A>(mean);
    static_cast<A*>(arguments.invstd)[c] = static_cast<A>(1 / sqrt(var + arguments.eps));
    if (!updates || arguments.running_mean.data == nullptr) continue;
    const double unbiased = var * (static_cast<double>(total) / static_cast<double>(total - 1));
    update_running(arguments.running_mean, c, mean, factor);
    update_running(arguments.running_var, c, unbiased, factor);
  }
}

}  // namespace

const char* gather_stats(const GatherArguments& arguments, Stream stream) {
  const int64_t needed = ceil_div(arguments.channels, kThreads);
  const int64_t blocks = arguments.averages || needed == 0 ? 1 : needed;
  const auto kernel = arguments.accumulate == DType::kDouble ? merge_ranks<double> : merge_ranks<float>;
  return launch(kernel, {blocks, 1, 1}, dim3(kThreads), stream, arguments);
}

}  // namespace bagua_syncbn::cuda
