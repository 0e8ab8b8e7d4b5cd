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

template <typename A>
__device__ __forceinline__ A from_first_lane(A value) {
  return __shfl_sync(kAllLanes, value, 0);
}

// The sum over the lanes of a warp; all of them get it.
template <typename A>
__device__ __forceinline__ A add_lanes(A value) {
#pragma unroll
  for (int distance = kWarp / 2; distance >= 1; distance /= 2) value += from_lane_after(value, distance);
  return from_first_lane(value);
}

// How two sets of `a` and `b` values are merged (Chan, Golub and LeVeque): the share of the second, and the factor of
// the squared difference of the means. No share if both are empty.
template <typename A>
struct Shares {
  A second;
  A cross;

  __device__ __forceinline__ Shares(A a, A b) : second(b > 0 ? b / (a + b) : 0), cross(a * second) {}
};

// Mean and sum of squared deviations.
template <typename A>
struct Moments {
  using Scalar = A;
  static constexpr bool kCounted = true;
  A mean;
  A m2;

  __device__ __forceinline__ void merge(const Moments& other, const Shares<A>& shares) {
    const A difference = other.mean - mean;
    mean += difference * shares.second;
    m2 += other.m2 + difference * difference * shares.cross;
  }
  __device__ __forceinline__ Moments of_lane_after(int distance) const {
    return {from_lane_after(mean, distance), from_lane_after(m2, distance)};
  }
};

// Two sums, to which counts do not matter: of a part of any reduction, and of gradients at every level.
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
// part.
template <int W, typename S, typename A>
__device__ __forceinline__ void reduce_warp(S (&values)[W], A& count, int stride) {
  for (int distance = kWarp / 2; distance >= stride; distance /= 2) merge_lanes(values, count, distance);
}

// reduce_warp() with a stride of one, in less machine code: for merges that divide.
template <typename S, typename A>
__device__ __forceinline__ void reduce_warp_in_a_loop(S (&values)[1], A& count) {
#pragma unroll 1
  for (int distance = kWarp / 2; distance >= 1; distance /= 2) merge_lanes(values, count, distance);
}

// Gives the first threads of the block, one for each warp, the value of that warp's first lane; S{} to all others.
template <typename S>
__device__ __forceinline__ S share_warps(const S& own) {
  __shared__ S of_warps[kThreads / kWarp];
  const int thread = thread_index(), warps = blockDim.x * blockDim.y / kWarp;
  if (thread % kWarp == 0) of_warps[thread / kWarp] = own;
  __syncthreads();
  const S found = thread < warps ? of_warps[thread] : S{};
  __syncthreads();  // before the next call writes there
  return found;
}

template <typename S, typename A>
struct Counted {
  S value;
  A count;
};

// Merges the sums of all threads of the block, of which the first `threads` have any; the result is that of thread 0.
// The other warps do nothing: consumer cards take 64 times as long for arithmetic in double as for that in float.
template <bool kInALoop = false, typename S, typename A>
__device__ void reduce_block(S& value, A& count, int64_t threads = kThreads) {
  const auto reduce = [](S(&values)[1], A& values_count) {
    if constexpr (kInALoop) {
      reduce_warp_in_a_loop(values, values_count);
    } else {
      reduce_warp(values, values_count, 1);
    }
  };
  S single[1] = {value};
  if (thread_index() / kWarp * kWarp < threads) reduce(single, count);
  const Counted<S, A> of_warp = share_warps(Counted<S, A>{single[0], count});
  if (thread_index() >= kWarp) return;
  single[0] = of_warp.value;
  count = of_warp.count;
  reduce(single, count);
  value = single[0];
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

// The sums of the parts of a channel: those from `first` on, every `step`-th. The last block does this while all
// others are done, so nothing hides how long a load takes but other loads.
template <int kAhead>
__device__ __forceinline__ Sums<double> add_partials(const double2* partials, int64_t channels, int64_t channel,
                                                     int first, int step, int64_t parts) {
  Sums<double> sums{0, 0};
  for (int64_t p = first; p < parts; p += kAhead * step) {
    double2 loaded[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t part = p + u * step;
      loaded[u] = part < parts ? __ldcg(partials + part * channels + channel) : double2{0, 0};
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) sums.add(loaded[u].x, loaded[u].y);
  }
  return sums;
}

// Planar: adds up what thread 0 of each part has. Whether this block has the result, in thread 0.
__device__ inline bool merge_parts(Sums<double>& sums, const Planar& plan, int64_t channel, int64_t part,
                                   const Scratch& scratch) {
  const int64_t parts = plan.parts();
  if (parts == 1) return true;
  if (thread_index() == 0) scratch.partials[part * plan.channels + channel] = {sums.first, sums.second};
  if (!arrives_last(scratch.tickets + channel, parts)) return false;
  sums = add_partials<4>(scratch.partials, plan.channels, channel, thread_index(), blockDim.x * blockDim.y, parts);
  double count = 0;
  reduce_block(sums, count, parts);
  return true;
}

// Interleaved: merges the sums that the threads of a block have for their W channels; the result for channel t of the
// tile is that of thread t.
template <int W, typename S, typename Count>
__device__ S reduce_rows(S (&values)[W], Count& count) {
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

// Interleaved: adds up what thread t of each part has for channel t of the tile. Whether this thread has a result.
__device__ inline bool merge_parts(Sums<double>& sums, const Interleaved& plan, int64_t tile_begin, int width,
                                   int64_t part, const Scratch& scratch) {
  const int thread = thread_index(), tile = blockDim.x * width;
  const bool has_channel = thread < tile && tile_begin + thread < plan.channels;
  if (plan.parts() == 1) return has_channel;
  if (has_channel) scratch.partials[part * plan.channels + tile_begin + thread] = {sums.first, sums.second};
  if (!arrives_last(scratch.tickets + tile_begin / tile, plan.parts())) return false;
  // Thread t takes every groups-th part of channel t % tile, and the groups are merged by halves.
  const int group = thread / tile, groups = blockDim.x * blockDim.y / tile;
  const int64_t channel = tile_begin + thread % tile;
  sums = {0, 0};
  if (channel < plan.channels)
    sums = add_partials<kMergeAhead>(scratch.partials, plan.channels, channel, group, groups, plan.parts());
  __shared__ Sums<double> rest[kThreads];
  for (int half = groups / 2; half > 0; half /= 2) {
    rest[thread] = sums;
    __syncthreads();
    if (group < half) sums.add(rest[thread + half * tile].first, rest[thread + half * tile].second);
    __syncthreads();
  }
  return has_channel;
}

// Sums of the channel in which the columns of a thread begin, and of the next one.
template <typename S>
struct Two {
  S here, next;
};

template <typename A, int W>
__device__ __forceinline__ Two<Sums<A>> by_channel(const Sums<A> (&columns)[W], const Border& border) {
  Two<Sums<A>> sums{};
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const bool here = w < border.columns;
    const A a = columns[w].first, b = columns[w].second;
    sums.here.add(here ? a : A(0), here ? b : A(0));
    sums.next.add(here ? A(0) : a, here ? A(0) : b);
  }
  return sums;
}

// Grouped: adds up what the threads of a block have; the result for channel t of the group is that of thread t.
template <int W, typename S>
__device__ S reduce_group(Two<S> sums, const GroupedWalk<W>& walk, const Grouped& plan) {
  __shared__ Two<S> all[kThreads];
  const int thread = thread_index(), columns = blockDim.x, threads = columns * blockDim.y;
  all[thread] = sums;
  __syncthreads();
  if (thread < columns) {
    for (int other = thread + columns; other < threads; other += columns) {
      sums.here.add(all[other].here.first, all[other].here.second);
      sums.next.add(all[other].next.first, all[other].next.second);
    }
    all[thread] = sums;
  }
  __syncthreads();
  S total{};
  if (thread >= walk.group()) return total;
  const int inner = static_cast<int>(plan.inner), begin = thread * inner;
  for (int slot = begin / W; slot * W < begin + inner; ++slot) {
    const S& found = slot * W < begin ? all[slot].next : all[slot].here;
    total.add(found.first, found.second);
  }
  return total;
}

}  // namespace bagua_syncbn::cuda
