// batch_norm_gather_stats: merges the statistics of all ranks and updates the running statistics.
//
// A thread merges one channel in double, in two passes over the ranks: mean and average variance, then deviations of
// the means. A rank's weight is its share of all values; one lane computes it for its warp. The order depends only on
// the number of ranks, so all ranks get the same bits.

#include "../packed_stats.h"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Number of ranks that a thread loads before it uses the first value.
constexpr int kRanksAtOnce = 8;
// Threads per block if there are several blocks: few, so that many multiprocessors share the double arithmetic.
constexpr int kFewThreads = 64;

// Returns the sum over the lanes of a warp, to all lanes.
template <typename V>
__device__ __forceinline__ V add_lanes(V value) {
#pragma unroll
  for (int distance = kWarp / 2; distance >= 1; distance /= 2) value += from_lane_after(value, distance);
  return __shfl_sync(kAllLanes, value, 0);
}

// The ranks' rows, or with `summed` the sum over ranks. All lanes of a warp construct it and merge together.
template <typename A>
class Ranks {
  const A* rows;
  const double* sums;  // null for rows
  int64_t channels, header_size, row_size;
  int number;
  double inverse;  // 1 / total; NaN if a message is invalid

 public:
  bool valid;         // whether all messages are valid
  int64_t total = 0;  // values per channel; 0 if a message is invalid

  __device__ __forceinline__ explicit Ranks(const GatherArguments& arguments)
      : rows(static_cast<const A*>(arguments.gathered)),
        sums(arguments.summed ? static_cast<const double*>(arguments.gathered) : nullptr),
        channels(arguments.channels),
        header_size(arguments.header_size),
        row_size(row_size_of(channels, header_size)),
        number(static_cast<int>(arguments.ranks)) {
    if (sums != nullptr) {
      valid = fault_of_sums(sums, channels, number, 0).kind == Fault::kNone;
      total = valid ? static_cast<int64_t>(sums[2 * channels]) : 0;
    } else {
      int wrong = 0;
      for (int rank = thread_index() % kWarp; rank < number; rank += kWarp) {
        const bool right = fault_of(rows + rank * row_size, rows, channels, header_size) == Fault::kNone;
        total += right ? count(rank) : 0;
        wrong += !right;
      }
      valid = add_lanes(wrong) == 0;
      total = add_lanes(total) * valid;
    }
    inverse = valid ? 1 / static_cast<double>(max(total, int64_t(1))) : static_cast<double>(NAN);
  }

  __device__ __forceinline__ int64_t count(int rank) const { return unpack_count(rows + rank * row_size, channels); }

  __device__ __forceinline__ void record(const GatherArguments& arguments) const {
    const Fault fault = sums != nullptr ? Fault{Fault::kSum, arguments.message_number}
                                        : find_fault(rows, number, channels, header_size);
    record_fault(arguments.fault, fault, rows, channels, header_size);
  }

  // Adds mean and variance of channel `c`, if it exists, to zeroed `mean` and `var`.
  __device__ __forceinline__ void merge(int64_t c, double& mean, double& var) const {
    if (sums != nullptr) {
      if (c < channels) unpack_moments(sums, channels, c, inverse, mean, var);
      return;
    }
    each(c, [&](double share, double rank_mean, double rank_var) {
      mean += share * rank_mean;
      var += share * rank_var;
    });
    each(c, [&](double share, double rank_mean, double) { var += share * (rank_mean - mean) * (rank_mean - mean); });
  }

 private:
  // Calls add(share, mean, variance) for channel `c` of each rank; zeros if channel `c` does not exist.
  template <typename Add>
  __device__ __forceinline__ void each(int64_t c, const Add& add) const {
    for (int begin = 0; begin < number; begin += kRanksAtOnce) {
      A means[kRanksAtOnce], vars[kRanksAtOnce];
      const A* row = rows + begin * row_size + c;
#pragma unroll
      for (int u = 0; u < kRanksAtOnce; ++u, row += row_size) {
        const bool exists = begin + u < number && c < channels;
        means[u] = exists ? row[0] : A(0);
        vars[u] = exists ? row[channels] : A(0);
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

// running += momentum * (value - running), in double. `old` is the loaded value of `running`.
__device__ void update_running(const MutablePerChannel& running, int64_t c, const ChannelValue& old, double value,
                               double momentum) {
  const double before = old.as<double>();
  write_channel(running, c, before + momentum * (value - before));
}

// The part of the work that one launch of merge_ranks does. Several blocks need two launches if updates depend on more
// than one channel: on the batch counter, which one thread changes, or on whether all channels are finite.
enum class Phase { kAll, kMerge, kUpdate };

// `found` passes values from kMerge to kUpdate: 1 for each block with finite statistics, then the momentum.
template <typename A>
__global__ void __launch_bounds__(kThreads, 2)
    merge_ranks(const GatherArguments arguments, Phase phase, double* found) {
  const Ranks<A> ranks(arguments);
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool first = c == 0, exists = c < arguments.channels, tracks = exists && arguments.running_mean.data != nullptr;
  ChannelValue old_mean, old_var;
  if (tracks) {
    old_mean = {arguments.running_mean, c};
    old_var = {arguments.running_var, c};
  }
  double momentum = arguments.momentum, mean = 0, var = 0;
  if (arguments.averages && phase != Phase::kUpdate)
    momentum = 1.0 / static_cast<double>(max(*arguments.batches + 1, int64_t(1)));
  ranks.merge(c, mean, var);
  bool finite = isfinite(mean) && isfinite(var);
  if (phase == Phase::kUpdate) {
    for (unsigned block = threadIdx.x; block < gridDim.x; block += blockDim.x) finite &= found[block] != 0;
    momentum = found[gridDim.x];
  } else {
    if (exists) {
      static_cast<A*>(arguments.mean)[c] = static_cast<A>(mean);
      static_cast<A*>(arguments.invstd)[c] = static_cast<A>(1 / sqrt(var + arguments.eps));
    }
    if (first) {
      *arguments.count = ranks.total;
      if (!ranks.valid) ranks.record(arguments);
    }
  }
  // This barrier also ensures that all threads of the block have read the counter.
  finite = __syncthreads_and(finite) || !arguments.skip_nonfinite;
  if (phase == Phase::kMerge) {
    if (threadIdx.x == 0) found[blockIdx.x] = finite;
    if (first) found[gridDim.x] = momentum;
    return;
  }
  if (!finite || ranks.total < 2) return;  // the unbiased variance needs at least two values
  if (first && arguments.batches != nullptr) ++*arguments.batches;
  if (!tracks) return;
  const auto count = static_cast<double>(ranks.total);
  update_running(arguments.running_mean, c, old_mean, mean, momentum);
  update_running(arguments.running_var, c, old_var, var * (count / (count - 1)), momentum);
}

}  // namespace

void gather_stats(const GatherArguments& arguments, Device& device) {
  const bool shares = arguments.averages || arguments.skip_nonfinite;  // threads share the counter or a flag
  const bool one_block = shares && arguments.channels <= kThreads, two_launches = shares && !one_block;
  const int threads = one_block ? kThreads : kFewThreads;
  const int64_t blocks = std::max<int64_t>(1, ceil_div(arguments.channels, threads));
  double* const found = two_launches ? device.allocate(blocks + 1) : nullptr;
  dispatch(arguments.accumulate, [&](auto value) {
    const auto run = [&](Phase phase) {
      using Merge = Kernel<merge_ranks<Accumulate<decltype(value)>>>;
      Merge::launch(dim3(blocks), dim3(threads), device.stream, arguments, phase, found);
    };
    if (!two_launches) return run(Phase::kAll);
    run(Phase::kMerge);
    run(Phase::kUpdate);
  });
}

}  // namespace bagua_syncbn::cuda
