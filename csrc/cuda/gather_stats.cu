// batch_norm_gather_stats: merges the statistics of all ranks, and updates the running ones.
//
// A thread merges one channel in double, in two passes over the ranks: mean and average variance, then the deviations
// of the means. A rank weighs as its share of all values, which one lane of a warp computes for all of them. The order
// depends on the number of ranks alone, so all ranks get the same bits.
//
// The first thread increases the counter of batches. There is one block if a thread needs more than its channels: the
// counter, for the average over all batches; or whether the statistics of all channels are finite.

#include "../packed_stats.h"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// How many ranks' values a thread loads at once.
constexpr int kRanksAtOnce = 8;
// Threads of a block where there are several: few, so that many multiprocessors share the arithmetic in double.
constexpr int kFewThreads = 64;

// The sum over the lanes of a warp; all of them get it.
template <typename A>
__device__ __forceinline__ A add_lanes(A value) {
#pragma unroll
  for (int distance = kWarp / 2; distance >= 1; distance /= 2) value += from_lane_after(value, distance);
  return __shfl_sync(kAllLanes, value, 0);
}

// The rows of the ranks. All lanes of a warp must construct it together, and merge channels together.
template <typename A>
class Ranks {
  const A* rows;
  int64_t channels, words, row_size;
  int number;
  double inverse;  // of the total; NaN if a row is not valid

 public:
  bool valid;         // whether all rows are
  int64_t total = 0;  // values of a channel; 0 if a row is not valid

  __device__ __forceinline__ explicit Ranks(const GatherArguments& arguments)
      : rows(static_cast<const A*>(arguments.gathered)),
        channels(arguments.channels),
        words(arguments.words),
        row_size(packed_size(channels, words)),
        number(static_cast<int>(arguments.ranks)) {
    int wrong = 0;
    for (int rank = thread_index() % kWarp; rank < number; rank += kWarp) {
      const bool right = fault_of(rows + rank * row_size, rows, channels, words) == Fault::kNone;
      total += right ? count(rank) : 0;
      wrong += !right;
    }
    valid = add_lanes(wrong) == 0;
    total = add_lanes(total) * valid;
    inverse = valid ? 1 / static_cast<double>(max(total, int64_t(1))) : static_cast<double>(NAN);
  }

  __device__ __forceinline__ int64_t count(int rank) const { return unpack_count(rows + rank * row_size, channels); }

  __device__ __forceinline__ void record(const GatherArguments& arguments) const {
    record_fault(arguments.fault, find_fault(rows, number, channels, words), rows, channels, words);
  }

  // Sets mean and variance of channel `c`, if there is one.
  __device__ __forceinline__ void merge(int64_t c, double& mean, double& var) const {
    each(c, [&](double share, double rank_mean, double rank_var) {
      mean += share * rank_mean;
      var += share * rank_var;
    });
    each(c, [&](double share, double rank_mean, double) { var += share * (rank_mean - mean) * (rank_mean - mean); });
  }

 private:
  // Calls add(share, mean, variance) for channel `c` of each rank; with zeros if there is no channel `c`.
  template <typename Add>
  __device__ __forceinline__ void each(int64_t c, const Add& add) const {
    for (int begin = 0; begin < number; begin += kRanksAtOnce) {
      A means[kRanksAtOnce], vars[kRanksAtOnce];
      const A* row = rows + begin * row_size + c;
#pragma unroll
      for (int u = 0; u < kRanksAtOnce; ++u, row += row_size) {
        const bool there = begin + u < number && c < channels;
        means[u] = there ? row[0] : A(0);
        vars[u] = there ? row[channels] : A(0);
      }
      const int rank = begin + thread_index() % kWarp;
      const double share = rank < number ? static_cast<double>(valid ? count(rank) : 1) * inverse : 0;
#pragma unroll
      for (int u = 0; u < kRanksAtOnce; ++u) {
        add(__shfl_sync(kAllLanes, share, u), static_cast<double>(means[u]), static_cast<double>(vars[u]));
      }
    }
  }
};

// What the ranks have added up, in double.
class SumOfRanks {
  const double* sums;
  int64_t channels;
  double inverse;

 public:
  bool valid;
  int64_t total;

  __device__ __forceinline__ explicit SumOfRanks(const GatherArguments& arguments)
      : sums(static_cast<const double*>(arguments.gathered)), channels(arguments.channels) {
    valid = fault_of_sums(sums, channels, arguments.ranks, 0).kind == Fault::kNone;
    total = valid ? static_cast<int64_t>(sums[2 * channels]) : 0;
    inverse = valid ? 1 / static_cast<double>(max(total, int64_t(1))) : static_cast<double>(NAN);
  }

  __device__ __forceinline__ void record(const GatherArguments& arguments) const {
    record_fault<double>(arguments.fault, {Fault::kSum, arguments.call}, nullptr, 0, 0);
  }

  __device__ __forceinline__ void merge(int64_t c, double& mean, double& var) const {
    if (c < channels) unpack_moments(sums, channels, c, inverse, mean, var);
  }
};

// `running` += factor * (value - running), in double; `old` is what it was.
__device__ void update_running(const MutablePerChannel& running, int64_t c, const ChannelValue& old, double value,
                               double factor) {
  const double before = old.as<double>();
  write_channel(running, c, before + factor * (value - before));
}

// Whether `holds` for all threads of the block.
__device__ __forceinline__ bool all_threads(bool holds) {
  __shared__ int failed[kThreads / kWarp];
  const int failures = add_lanes(holds ? 0 : 1);
  if (threadIdx.x % kWarp == 0) failed[threadIdx.x / kWarp] = failures;
  __syncthreads();
  int all = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) all += failed[warp];
  return all == 0;
}

template <typename A, typename Source>
__global__ void __launch_bounds__(kThreads, 2) merge_ranks(const GatherArguments arguments) {
  const Source ranks(arguments);
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  double factor = arguments.momentum;
  if (arguments.averages) factor = 1.0 / static_cast<double>(max(*arguments.batches + 1, int64_t(1)));
  bool updates = ranks.total >= 2;  // else there is no unbiased variance
  if (first) {
    *arguments.count = ranks.total;
    if (!ranks.valid) ranks.record(arguments);
  }

  // Twice if it has to be known of all channels, before any buffer changes, whether they are finite.
  bool finite = true;
#pragma unroll 1
  for (bool writes = !arguments.skip_nonfinite;; writes = true) {
    if (writes) {
      updates &= all_threads(finite);  // also the barrier after which all threads have read the counter
      if (first && updates && arguments.batches != nullptr) ++*arguments.batches;
    }
    for (int64_t begin = int64_t(blockIdx.x) * blockDim.x; begin < arguments.channels;
         begin += gridDim.x * blockDim.x) {
      const int64_t c = begin + threadIdx.x;
      const bool there = c < arguments.channels, tracks = there && arguments.running_mean.data != nullptr;
      ChannelValue old_mean{}, old_var{};
      if (tracks) {
        old_mean = load_channel(arguments.running_mean, c);
        old_var = load_channel(arguments.running_var, c);
      }
      double mean = 0, var = 0;
      ranks.merge(c, mean, var);
      finite &= isfinite(mean) && isfinite(var);
      if (!writes || !there) continue;
      static_cast<A*>(arguments.mean)[c] = static_cast<A>(mean);
      static_cast<A*>(arguments.invstd)[c] = static_cast<A>(1 / sqrt(var + arguments.eps));
      if (!updates || !tracks) continue;
      const auto count = static_cast<double>(ranks.total);
      update_running(arguments.running_mean, c, old_mean, mean, factor);
      update_running(arguments.running_var, c, old_var, var * (count / (count - 1)), factor);
    }
    if (writes) return;
  }
}

}  // namespace

void gather_stats(const GatherArguments& arguments, Device& device) {
  const bool one_block = arguments.averages || arguments.skip_nonfinite || arguments.channels == 0;
  const int threads = one_block ? kThreads : kFewThreads;
  const int64_t blocks = one_block ? 1 : ceil_div(arguments.channels, threads);
  const auto start = [&](auto merge) { merge.launch({blocks, 1}, {threads, 1}, device.stream, arguments); };
  if (arguments.is_sum) return start(Kernel<merge_ranks<float, SumOfRanks>>());
  dispatch(arguments.accumulate, [&](auto value) {
    using A = Accumulate<decltype(value)>;
    start(Kernel<merge_ranks<A, Ranks<A>>>());
  });
}

}  // namespace bagua_syncbn::cuda
