// Sums that are merged: of threads of a warp by shuffles, of warps in shared memory, of blocks by the last to arrive.
// The order is fixed at every level, so the result does not depend on scheduling.
#pragma once

#include "launch.cuh"
#include "walk.cuh"

namespace bagua_syncbn::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

template <typename A>
__device__ __forceinline__ A from_lane_after(A value, int distance) {
  return __shfl_down_sync(kAllLanes, value, distance);
}

// How two sets of `a` and `b` values are merged (Chan, Golub and LeVeque): the share of the second, and the factor of
// the squared difference of the means. No share if both are empty.
template <typename A>
struct Shares {
  A second;
  A cross;

  __device__ __forceinline__ Shares(A a, A b) : second(b > 0 ? b / (a + b) : 0), cross(a * second) {}
};

// Moments of values: their mean beside a center, which is one of them, and the sum of squared deviations. In float as
// precise as deviations from the center are.
template <typename A>
struct Centered {
  using Scalar = A;
  static constexpr bool kCounted = true;
  A center;
  A mean;
  A m2;

  __device__ __forceinline__ void merge(const Centered& other, const Shares<A>& shares) {
    const A difference = (other.center - center) + (other.mean - mean);
    const bool is_first = shares.second == 1;  // there were no values
    m2 += other.m2 + difference * difference * shares.cross;
    mean = is_first ? other.mean : mean + difference * shares.second;
    center = is_first ? other.center : center;
  }
  __device__ __forceinline__ Centered of_lane_after(int distance) const {
    return {from_lane_after(center, distance), from_lane_after(mean, distance), from_lane_after(m2, distance)};
  }
  __device__ __forceinline__ double2 packed() const {
    return {static_cast<double>(center) + static_cast<double>(mean), static_cast<double>(m2)};
  }
  __device__ __forceinline__ static Centered unpacked(double2 values) { return {values.x, 0, values.y}; }
};

// A pair of sums: a part of any reduction, and gradients at every level. Merging ignores counts.
template <typename A>
struct Sums {
  using Scalar = A;
  static constexpr bool kCounted = false;
  A first;
  A second;

  __device__ __forceinline__ void add(A a, A b) {
    first += a;
    second += b;
  }
  __device__ __forceinline__ void merge(const Sums& other, const Shares<A>&) { add(other.first, other.second); }
  __device__ __forceinline__ Sums of_lane_after(int distance) const {
    return {from_lane_after(first, distance), from_lane_after(second, distance)};
  }
  __device__ __forceinline__ double2 packed() const { return {first, second}; }
  __device__ __forceinline__ static Sums unpacked(double2 values) { return {values.x, values.y}; }
};

// Merges `values`, W sums over `count` values each, with those of the lane `distance` after. Here and below, a count
// can be an integer, which is exact beyond 2^24.
template <int W, typename S, typename Count>
__device__ __forceinline__ void merge_lanes(S (&values)[W], Count& count, int distance) {
  using A = typename S::Scalar;
  const Count other = S::kCounted ? from_lane_after(count, distance) : Count(0);
  const Shares<A> shares(static_cast<A>(count), static_cast<A>(other));
#pragma unroll
  for (int w = 0; w < W; ++w) values[w].merge(values[w].of_lane_after(distance), shares);
  count += other;
}

// Merges those of every `stride`-th lane; the results are those of the first `stride` lanes. All lanes of the warp take
// part. A loop where merging divides: that is long.
template <int W, typename S, typename Count>
__device__ __forceinline__ void reduce_warp(S (&values)[W], Count& count, int stride) {
#pragma unroll(S::kCounted ? 1 : 5)
  for (int distance = kWarp / 2; distance >= stride; distance /= 2) merge_lanes(values, count, distance);
}

// Merges the values of the first `threads` threads of the block; thread 0 gets the result. The other warps do nothing:
// on consumer cards arithmetic in double takes 64 times as long as in float. Needs a barrier between two calls, as
// arrives_last() has.
template <typename S, typename Count>
__device__ void reduce_block(S (&value)[1], Count& count, int64_t threads = kThreads) {
  struct Counted {
    S value;
    Count count;
  };
  __shared__ Counted of_warps[kThreads / kWarp];
  const int thread = thread_index(), warps = blockDim.x * blockDim.y / kWarp;
  if (thread / kWarp * kWarp < threads) reduce_warp(value, count, 1);
  if (thread % kWarp == 0) of_warps[thread / kWarp] = {value[0], count};
  __syncthreads();
  if (thread >= kWarp) return;
  const Counted of_warp = thread < warps ? of_warps[thread] : Counted{};
  value[0] = of_warp.value;
  count = of_warp.count;
  reduce_warp(value, count, 1);
}

// Counts `counter` up, or from `highest` to zero, and returns what it was: what this thread wrote or has seen before is
// seen by who counts up after it.
__device__ inline unsigned count_up(unsigned* counter, unsigned highest) {
#if defined(BAGUA_SYNCBN_EMULATOR)
  return atomicInc(counter, highest);
#else
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(counter)), "r"(highest)
               : "memory");
  return old;
#endif
}

// Whether this block is the last of `parts` to arrive at `ticket`. Then it sees what all other blocks wrote before.
//
// The barrier orders what the threads of a block wrote before thread 0's increment. That is a release, which makes it
// visible to all blocks, also what thread 0 knows of only by the barrier; and an acquire: the block that draws the last
// number is after all other increments, and the second barrier orders the reads of its threads after that. It reads
// with __ldcg, from L2: L1 might hold what lay there before. tests/ops/test_cuda.py holds these steps.
// Where thread 0 alone has written, as in planar kernels, the first barrier only separates two calls of reduce_block().
// The counter wraps to zero at the last increment, so the next kernel on the stream finds it as this one did.
__device__ inline bool arrives_last(uint32_t* ticket, int64_t parts) {
  __shared__ bool last;
  __syncthreads();
  if (thread_index() == 0) {
    const unsigned highest = static_cast<unsigned>(parts - 1);
    last = count_up(ticket, highest) == highest;
  }
  __syncthreads();
  return last;
}

// Partial results of the parts of a channel in memory: two doubles each, and two more if their values are counted.
template <typename S>
struct Partials {
  double2* values;
  int64_t channels;

  __device__ __forceinline__ double2* entry(int64_t part, int64_t channel) const {
    return values + (S::kCounted ? 2 : 1) * (part * channels + channel);
  }

  __device__ __forceinline__ void leave(int64_t part, int64_t channel, const S& value, double count) const {
    double2* const at = entry(part, channel);
    at[0] = value.packed();
    if (S::kCounted) at[1] = {count, 0};
  }

  // Merges those of parts from `first` on, every `step`-th. The last block does this while all others are done, so
  // nothing hides how long a load takes but other loads.
  __device__ __forceinline__ void merge(S& value, double& count, int64_t channel, int first, int step,
                                        int64_t parts) const {
    constexpr int kAtOnce = S::kCounted ? 2 : kPartialsAtOnce;
    value = {};
    count = 0;
    for (int64_t p = first; p < parts; p += kAtOnce * step) {
      double2 loaded[kAtOnce], counts[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int64_t part = p + u * step;
        const bool there = part < parts;
        loaded[u] = there ? __ldcg(entry(part, channel)) : double2{0, 0};
        counts[u] = S::kCounted && there ? __ldcg(entry(part, channel) + 1) : double2{0, 0};
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        value.merge(S::unpacked(loaded[u]), Shares<double>(count, counts[u].x));
        count += counts[u].x;
      }
    }
  }
};

// Planar: merges what thread 0 of each part has. Whether this thread has the result, in the last block thread 0.
template <int W, typename S>
__device__ bool merge_parts(S& value, double& count, const Planar& plan, const PlanarWalk<W>& walk,
                            const Scratch& scratch) {
  const int64_t parts = plan.parts;
  if (parts > 1) {
    const Partials<S> partials{scratch.partials, plan.channels};
    if (thread_index() == 0) partials.leave(walk.part, walk.channel, value, count);
    if (!arrives_last(scratch.tickets + walk.channel, parts)) return false;
    S merged[1];
    partials.merge(merged[0], count, walk.channel, thread_index(), blockDim.x * blockDim.y, parts);
    reduce_block(merged, count, parts);
    value = merged[0];
  }
  return thread_index() == 0;
}

// Planar: merges what the threads of a block have for its channel; thread 0 gets the result.
template <int W, typename S, typename Count>
__device__ __forceinline__ S reduce_threads(const PlanarWalk<W>&, S (&values)[1], Count& count) {
  reduce_block(values, count);
  return values[0];
}

// Interleaved: merges what the threads of a block have for their W channels; thread t gets the result for channel t of
// the tile.
template <int W, typename S, typename Count>
__device__ __forceinline__ S reduce_threads(const InterleavedWalk<W>&, S (&values)[W], Count& count) {
  using A = typename S::Scalar;
  __shared__ S rows[kThreads / kWarp][kTileChannels<W>];
  __shared__ Count counts[kThreads / kWarp];
  const int thread = thread_index(), lane = thread % kWarp, warp = thread / kWarp;
  const int columns = blockDim.x, warps = blockDim.x * blockDim.y / kWarp;
  reduce_warp(values, count, columns);
  if (lane < columns) {
#pragma unroll
    for (int w = 0; w < W; ++w) rows[warp][lane * W + w] = values[w];
    if (lane == 0) counts[warp] = count;
  }
  __syncthreads();
  S result{};
  count = 0;
  if (thread < columns * W) {
    for (int i = 0; i < warps; ++i) {
      result.merge(rows[i][thread], Shares<A>(static_cast<A>(count), static_cast<A>(counts[i])));
      count += counts[i];
    }
  }
  return result;
}

// Interleaved: merges what thread t of each part has for channel t of the tile. Whether this thread has a result.
template <int W, typename S>
__device__ bool merge_parts(S& value, double& count, const Interleaved& plan, const InterleavedWalk<W>& walk,
                            const Scratch& scratch) {
  const int64_t parts = plan.parts;
  if (parts == 1) return walk.writes();
  const Partials<S> partials{scratch.partials, plan.channels};
  const int thread = thread_index(), tile = blockDim.x * W;
  if (walk.writes()) partials.leave(walk.part, walk.first_channel() + thread, value, count);
  if (!arrives_last(scratch.tickets + walk.first_channel() / tile, parts)) return false;
  // Thread t takes every groups-th part of channel t % tile, and the groups are merged by halves.
  const int group = thread / tile, groups = blockDim.x * blockDim.y / tile;
  const int64_t channel = walk.first_channel() + thread % tile;
  value = {};
  count = 0;
  if (channel < plan.channels) partials.merge(value, count, channel, group, groups, parts);
  __shared__ S values[kThreads];
  __shared__ double counts[kThreads];
  for (int half = groups / 2; half > 0; half /= 2) {
    values[thread] = value;
    if (S::kCounted) counts[thread] = count;
    __syncthreads();
    if (group < half) {
      const int other = thread + half * tile;
      const double added = S::kCounted ? counts[other] : 0;
      value.merge(values[other], Shares<double>(count, added));
      count += added;
    }
    __syncthreads();
  }
  return walk.writes();
}

}  // namespace bagua_syncbn::cuda
