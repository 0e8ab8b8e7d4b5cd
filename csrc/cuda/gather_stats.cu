// batch_norm_gather_stats: the statistics of all ranks together, and the running ones.
//
// A block has blockDim.x channels, one for each column of threads, and blockDim.y groups of threads, among which it
// shares out a tile of ranks:
//
//   ranks 0 – 7     t0  t1  … t31      group 0
//   ranks 8 – 15    t32 t33 … t63      group 1
//   …
//
// First all threads read the counts, each those of other ranks. Then means and variances are added up in double, by
// each thread those of the ranks of its group, which it loads at once, and by halves over the groups. A rank weighs as
// its share of all values, which a thread computes for the whole block. There is one tile, and nothing is loaded twice,
// up to 256 ranks. The order depends on the number of ranks alone, so all ranks get the same bits.
//
// The counter of batches is increased by the first thread. There is one block where threads need more than their
// channels: the counter, for the average over all batches, which they read before a barrier, or whether all statistics
// are finite.

#include "../packed_stats.h"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Ranks of a group, whose values a thread has in registers.
template <typename A>
constexpr int kAhead = 32 / sizeof(A);

// The messages of the ranks.
template <typename A>
struct Rows {
  const A* first;
  int64_t channels, words, size;
  int ranks;

  __device__ explicit Rows(const GatherArguments& arguments)
      : first(static_cast<const A*>(arguments.gathered)),
        channels(arguments.channels),
        words(arguments.words),
        size(packed_size(channels, words)),
        ranks(static_cast<int>(arguments.ranks)) {}

  __device__ __forceinline__ const A* operator[](int rank) const { return first + rank * size; }
  __device__ __forceinline__ bool valid(int rank) const {
    return fault_of((*this)[rank], first, channels, words) == Fault::kNone;
  }
  __device__ __forceinline__ int64_t count(int rank) const { return unpack_count((*this)[rank], channels); }
};

// The share that each rank of a tile has of all values; NaN where the ranks do not speak of the same.
template <typename A>
class RankShares {
 public:
  bool valid;
  int64_t total;  // values, none if not valid

  // Ends the last tile. All threads of the block must call this, and move().
  __device__ __forceinline__ RankShares(const Rows<A>& rows, double (&shares)[kThreads])
      : rows_(rows), shares_(shares) {
    Sums<int64_t> found{0, 0};  // values, and rows that are wrong
    int64_t count = 0;
    for (int begin = 0; begin < rows.ranks; begin += kThreads) {
      const int rank = begin + thread_index();
      const bool right = rank >= rows.ranks || rows.valid(rank);
      count = rank < rows.ranks && right ? rows.count(rank) : 0;
      found.add(count, !right);
    }
    int64_t unused = 0;
    reduce_block(found, unused);
    __shared__ Sums<int64_t> all;
    if (thread_index() == 0) all = found;
    __syncthreads();
    valid = all.second == 0;
    total = valid ? all.first : 0;
    inverse_ = valid ? 1 / static_cast<double>(max(total, int64_t(1))) : static_cast<double>(NAN);
    shares_[thread_index()] = static_cast<double>(count) * inverse_;
    __syncthreads();
  }

  // To the tile from rank `begin` on.
  __device__ __forceinline__ void move(int begin) {
    const int rank = begin + thread_index();
    const double share = rank < rows_.ranks ? static_cast<double>(rows_.count(rank)) * inverse_ : 0;
    __syncthreads();  // all have used the last ones
    shares_[thread_index()] = share;
    __syncthreads();
  }

  // The values of rank `u` of this group.
  __device__ __forceinline__ double operator[](int u) const { return shares_[kAhead<A> * threadIdx.y + u]; }

 private:
  const Rows<A>& rows_;
  double (&shares_)[kThreads];
  double inverse_;
};

// The sum over the groups of the block, of each column; all threads get it.
__device__ __forceinline__ double add_groups(double value) {
  if (blockDim.y == 1) return value;
  __shared__ double values[kThreads];
  values[thread_index()] = value;
  __syncthreads();
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) values[thread_index()] += values[thread_index() + half * blockDim.x];
    __syncthreads();
  }
  const double sum = values[threadIdx.x];
  __syncthreads();  // before the next call writes there
  return sum;
}

// The values of a channel from the ranks of this group; zeros where there are no more.
template <typename A>
struct Values {
  A means[kAhead<A>], vars[kAhead<A>];

  __device__ __forceinline__ void load(const Rows<A>& rows, int begin, int64_t c) {
    const int rank = begin + kAhead<A> * static_cast<int>(threadIdx.y);
    const A* row = rows[rank] + c;
#pragma unroll
    for (int u = 0; u < kAhead<A>; ++u, row += rows.size) {
      const bool there = rank + u < rows.ranks;
      means[u] = there ? row[0] : A(0);
      vars[u] = there ? row[rows.channels] : A(0);
    }
  }
};

// Mean and biased variance of a channel over all ranks.
struct Merged {
  double mean = 0, var = 0;
  __device__ bool finite() const { return isfinite(mean) && isfinite(var); }
};

// The mean from the last tile to the first, the variance from there to the last, each beginning where the one before
// has ended.
template <typename A>
__device__ __forceinline__ Merged merge_channel(const Rows<A>& rows, RankShares<A>& shares, int64_t c) {
  Merged merged;
  Values<A> values;
  int begin = (rows.ranks - 1) / kThreads * kThreads;
  values.load(rows, begin, c);
  for (;;) {
#pragma unroll
    for (int u = 0; u < kAhead<A>; ++u) merged.mean += shares[u] * static_cast<double>(values.means[u]);
    if (begin == 0) break;
    begin -= kThreads;
    values.load(rows, begin, c);
    shares.move(begin);
  }
  merged.mean = add_groups(merged.mean);
  for (;;) {
#pragma unroll
    for (int u = 0; u < kAhead<A>; ++u) {
      const double difference = static_cast<double>(values.means[u]) - merged.mean;
      merged.var += shares[u] * (static_cast<double>(values.vars[u]) + difference * difference);
    }
    begin += kThreads;
    if (begin >= rows.ranks) break;
    values.load(rows, begin, c);
    shares.move(begin);
  }
  merged.var = add_groups(merged.var);
  return merged;
}

// `running` += factor * (value - running), in double; `old` is what it was.
__device__ void update_running(const PerChannel& running, int64_t c, const ChannelValue& old, double value,
                               double factor) {
  const double before = old.as<double>();
  write_channel(running, c, before + factor * (value - before));
}

// Whether `holds` for all threads of the block.
__device__ __forceinline__ bool all_threads(bool holds) {
  __shared__ int32_t all;
  if (thread_index() == 0) all = 1;
  __syncthreads();
  if (!holds) all = 0;
  __syncthreads();
  return all != 0;
}

template <typename A>
__global__ void __launch_bounds__(kThreads, 4) merge_ranks(const GatherArguments arguments) {
  const Rows<A> rows(arguments);
  const bool first = blockIdx.x == 0 && thread_index() == 0;
  double factor = arguments.momentum;  // the counter is increased after several barriers
  if (arguments.averages) factor = 1.0 / static_cast<double>(max(*arguments.batches + 1, int64_t(1)));
  __shared__ double of_tile[kThreads];
  RankShares<A> shares(rows, of_tile);
  bool updates = shares.total >= 2;  // else there is no unbiased variance
  if (first) {
    *arguments.count = shares.total;
    if (!shares.valid) {
      const Fault fault = find_fault(rows.first, rows.ranks, rows.channels, rows.words);
      record_fault(arguments.fault, fault, rows.first, rows.channels, rows.words);
    }
  }

  // Twice where it has to be known of all channels, before any buffer changes, whether they are finite.
  bool finite = true;
#pragma unroll 1
  for (bool writes = !arguments.skip_nonfinite;; writes = true) {
    if (writes) {
      if (arguments.skip_nonfinite) updates &= all_threads(finite);
      if (first && updates && arguments.batches != nullptr) ++*arguments.batches;
    }
    for (int64_t begin = int64_t(blockIdx.x) * blockDim.x; begin < rows.channels; begin += gridDim.x * blockDim.x) {
      const int64_t c = min(begin + threadIdx.x, rows.channels - 1);  // all threads take part
      const ChannelValue old_mean = load_channel(arguments.running_mean, c);
      const ChannelValue old_var = load_channel(arguments.running_var, c);
      const Merged merged = merge_channel(rows, shares, c);
      finite &= merged.finite();
      if (!writes || threadIdx.y > 0 || begin + threadIdx.x >= rows.channels) continue;
      static_cast<A*>(arguments.mean)[c] = static_cast<A>(merged.mean);
      static_cast<A*>(arguments.invstd)[c] = static_cast<A>(1 / sqrt(merged.var + arguments.eps));
      if (!updates || arguments.running_mean.data == nullptr) continue;
      const double unbiased = merged.var * (static_cast<double>(shares.total) / static_cast<double>(shares.total - 1));
      update_running(arguments.running_mean, c, old_mean, merged.mean, factor);
      update_running(arguments.running_var, c, old_var, unbiased, factor);
    }
    if (writes) return;
  }
}

const Known known(merge_ranks<float>, merge_ranks<double>);

// As many groups as ranks are for, up to a block that has as many threads as a tile has ranks.
template <typename A>
const char* launch_merge(const GatherArguments& arguments, Stream stream) {
  const int64_t groups = power_of_two(ceil_div(arguments.ranks, kAhead<A>), 1, kThreads / kAhead<A>);
  const int64_t columns = kThreads / groups, needed = ceil_div(arguments.channels, columns);
  const int64_t blocks = arguments.averages || arguments.skip_nonfinite || needed == 0 ? 1 : needed;
  const dim3 threads(static_cast<unsigned>(columns), static_cast<unsigned>(groups));
  return launch(merge_ranks<A>, {blocks, 1, 1}, threads, stream, arguments);
}

}  // namespace

const char* gather_stats(const GatherArguments& arguments, Stream stream) {
  return arguments.accumulate == DType::kDouble ? launch_merge<double>(arguments, stream)
                                                : launch_merge<float>(arguments, stream);
}

}  // namespace bagua_syncbn::cuda
