// batch_norm_gather_stats: the statistics of all ranks together, and the running ones.
//
// A thread takes a channel and goes over the ranks twice, in their order and in double, so that all ranks get the same
// bits: neighbouring threads read neighbouring values of a row, and each those of several ranks at once. The counter of
// batches is increased by the first thread. There is one block where threads need more than their channels: the
// counter, for the average over all batches, which they read before a barrier, or whether all statistics are finite.

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
  const int64_t size = packed_size(arguments.channels, arguments.words);
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

// Mean and biased variance of a channel over all ranks.
struct Merged {
  double mean = 0, var = 0;
  __device__ bool finite() const { return isfinite(mean) && isfinite(var); }
};

template <typename A, typename Share>
__device__ __forceinline__ Merged merge_channel(const GatherArguments& arguments, int64_t c, const Share& share) {
  Merged merged;
  for_each_rank<A>(arguments, c, [&](const A* row, double own, double) { merged.mean += share(row) * own; });
  for_each_rank<A>(arguments, c, [&](const A* row, double own, double own_var) {
    const double difference = own - merged.mean;
    merged.var += share(row) * (own_var + difference * difference);
  });
  return merged;
}

// Whether `holds` for all threads of the block.
__device__ __forceinline__ bool all_threads(bool holds) {
  __shared__ int32_t all;
  if (threadIdx.x == 0) all = 1;
  __syncthreads();
  if (!holds) all = 0;
  __syncthreads();
  return all != 0;
}

template <typename A>
__global__ void __launch_bounds__(kThreads) merge_ranks(const GatherArguments arguments) {
  const A* gathered = static_cast<const A*>(arguments.gathered);
  const int64_t channels = arguments.channels, size = packed_size(channels, arguments.words);
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  const Fault fault = find_fault(gathered, arguments.ranks, channels, arguments.words);
  const bool valid = fault.kind == Fault::kNone;
  if (first) record_fault(arguments.fault, fault, gathered, channels, arguments.words);
  int64_t total = 0;
  for (int64_t r = 0; valid && r < arguments.ranks; ++r) total += unpack_count(gathered + r * size, channels);
  const double inverse = valid ? 1.0 / static_cast<double>(total > 0 ? total : 1) : static_cast<double>(NAN);
  const auto share = [&](const A* row) {
    return valid ? static_cast<double>(unpack_count(row, channels)) * inverse : inverse;
  };
  const int64_t begin = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;

  bool updates = total >= 2;  // else there is no unbiased variance
  double factor = arguments.momentum;
  if (arguments.averages) {
    factor = 1.0 / static_cast<double>(max(*arguments.batches + 1, int64_t(1)));
    __syncthreads();  // all have read it
  }
  if (first) *arguments.count = total;

  // Twice where it has to be known of all channels, before any buffer changes, whether they are finite.
  bool finite = true;
#pragma unroll 1
  for (bool writes = !arguments.skip_nonfinite;; writes = true) {
    if (writes) {
      if (arguments.skip_nonfinite) updates &= all_threads(finite);
      if (first && updates && arguments.batches != nullptr) ++*arguments.batches;
    }
    for (int64_t c = begin; c < channels; c += step) {
      const Merged merged = merge_channel<A>(arguments, c, share);
      finite &= merged.finite();
      if (!writes) continue;
      static_cast<A*>(arguments.mean)[c] = static_cast<A>(merged.mean);
      static_cast<A*>(arguments.invstd)[c] = static_cast<A>(1 / sqrt(merged.var + arguments.eps));
      if (!updates || arguments.running_mean.data == nullptr) continue;
      const double unbiased = merged.var * (static_cast<double>(total) / static_cast<double>(total - 1));
      update_running(arguments.running_mean, c, merged.mean, factor);
      update_running(arguments.running_var, c, unbiased, factor);
    }
    if (writes) return;
  }
}

}  // namespace

const char* gather_stats(const GatherArguments& arguments, Stream stream) {
  const int64_t needed = ceil_div(arguments.channels, kThreads);
  const int64_t blocks = arguments.averages || arguments.skip_nonfinite || needed == 0 ? 1 : needed;
  const auto kernel = arguments.accumulate == DType::kDouble ? merge_ranks<double> : merge_ranks<float>;
  return launch(kernel, {blocks, 1, 1}, dim3(kThreads), stream, arguments);
}

}  // namespace bagua_syncbn::cuda
