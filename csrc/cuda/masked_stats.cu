// batch_norm_masked_stats: as stats.cu, of the positions that count.
//
// Threads are mapped to data as there, and add up deviations from a center, their own first value that counts. What is
// not known here is how many values a part has, nor of any value, before it is read, that it counts: so there is no
// origin in common. Threads are merged by center, mean beside it, sum of squared deviations and count; parts in double.

#include "../packed_stats.h"
#include "batch.cuh"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Moments of which the mean is that beside a center, one of the values: in float as precise as deviations from it are.
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
  __device__ __forceinline__ Moments<double> in_double() const {
    return {static_cast<double>(center) + static_cast<double>(mean), m2};
  }
};

// The moments of a thread, from sums about a center.
template <typename A>
__device__ __forceinline__ Centered<A> moments_about(A center, const Sums<A>& sums, A count) {
  if (count == 0) return {0, 0, 0};
  const A mean = sums.first / count;
  return {center, mean, max(A(0), sums.second - mean * sums.first)};
}

// A part leaves two entries for each channel: mean and sum of squared deviations, and the count.
__device__ __forceinline__ void leave(const Scratch& scratch, int64_t entry, const Moments<double>& moments,
                                      double count) {
  scratch.partials[2 * entry] = {moments.mean, moments.m2};
  scratch.partials[2 * entry + 1] = {count, 0};
}

template <typename A>
__device__ __forceinline__ void write_stats(A* packed, int64_t channels, int64_t c, const Moments<double>& moments,
                                            double count, const Words& words) {
  packed[c] = static_cast<A>(moments.mean);
  packed[channels + c] = static_cast<A>(count > 0 ? moments.m2 / count : 0);
  if (c == 0) pack_count(packed, channels, static_cast<int64_t>(count), words);
}

// Merges those of the parts from `first` on, every `step`-th.
__device__ __forceinline__ void take(Moments<double>& moments, double& count, const Scratch& scratch, int64_t channels,
                                     int64_t channel, int first, int step, int64_t parts) {
  moments = {0, 0};
  count = 0;
  for (int64_t p = first; p < parts; p += step) {
    const double2 loaded = __ldcg(scratch.partials + 2 * (p * channels + channel));
    const double added = __ldcg(scratch.partials + 2 * (p * channels + channel) + 1).x;
    moments.merge({loaded.x, loaded.y}, Shares<double>(count, added));
    count += added;
  }
}

// Merges what the threads of a block have, and then, in the last block, what its parts have left. Whether this thread
// has the result: for the one channel of the block; for channel t of the tile, thread t.
template <int W, typename A>
__device__ __forceinline__ bool merge(Moments<double>& moments, double& count, Centered<A> (&own)[1],
                                      unsigned own_count, const Planar& plan, const PlanarWalk<W>& walk,
                                      const Scratch& scratch) {
  reduce_block<true>(own[0], own_count);
  moments = own[0].in_double();
  count = own_count;
  const bool first = thread_index() == 0;
  const int64_t parts = plan.parts();
  if (parts == 1) return first;
  if (first) leave(scratch, walk.part * plan.channels + walk.channel, moments, count);
  if (!arrives_last(scratch.tickets + walk.channel, parts)) return false;
  take(moments, count, scratch, plan.channels, walk.channel, thread_index(), blockDim.x * blockDim.y, parts);
  reduce_block<true>(moments, count, parts);
  return first;
}

// Ends the last block of a tile: merges the moments of all parts. The result for channel t of the tile is that of
// thread t, as in merge_parts.
__device__ inline void take_tile(Moments<double>& moments, double& count, const Interleaved& plan, int64_t tile_begin,
                                 int tile, const Scratch& scratch) {
  const int thread = thread_index(), group = thread / tile, groups = blockDim.x * blockDim.y / tile;
  const int64_t channel = tile_begin + thread % tile;
  if (channel < plan.channels) {
    take(moments, count, scratch, plan.channels, channel, group, groups, plan.parts());
  }
  __shared__ Moments<double> rest[kThreads];
  __shared__ double counts[kThreads];
  for (int half = groups / 2; half > 0; half /= 2) {
    rest[thread] = moments;
    counts[thread] = count;
    __syncthreads();
    if (group < half) {
      const int other = thread + half * tile;
      moments.merge(rest[other], Shares<double>(count, counts[other]));
      count += counts[other];
    }
    __syncthreads();
  }
}

template <int W, typename A>
__device__ __forceinline__ bool merge(Moments<double>& moments, double& count, Centered<A> (&own)[W],
                                      unsigned own_count, const Interleaved& plan, const InterleavedWalk<W>& walk,
                                      const Scratch& scratch) {
  const Centered<A> sum = reduce_rows<W>(own, own_count);
  moments = {0, 0};
  count = own_count;
  const int tile = blockDim.x * W;
  const int64_t channel = walk.tile_begin + thread_index();
  const bool has_channel = thread_index() < tile && channel < plan.channels;
  if (has_channel) moments = sum.in_double();
  if (plan.parts() == 1) return has_channel;
  if (has_channel) leave(scratch, walk.part * plan.channels + channel, moments, count);
  if (!arrives_last(scratch.tickets + walk.tile_begin / tile, plan.parts())) return false;
  take_tile(moments, count, plan, walk.tile_begin, tile, scratch);
  return has_channel;
}

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 2)
    masked_stats(Plan plan, const T* x, Masked mask, A* packed, Words words, Scratch scratch) {
  using Slots = Batch<Plan, W, kSlots<W>, Masked>;
  constexpr int kLanes = Slots::kLanes;
  Slots batch(plan, mask, false);
  Loaded<T, W, kSlots<W>, Read::kAgain> values;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    batch.read_mask();
  };
  A centers[kLanes] = {};
  Sums<A> sums[kLanes] = {};
  unsigned found = 0;
  load();
  while (batch.any) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (found == 0) {
#pragma unroll
        for (int i = kSlots<W> * W / kLanes - 1; i >= 0; --i) {
          const int u = i * kLanes / W, w = i * kLanes % W + lane;
          if (batch.counts(w, u)) centers[lane] = widen(values.slot(u).values[w]);
        }
      }
      Sums<A> added{0, 0};
#pragma unroll
      for (int i = 0; i < kSlots<W> * W / kLanes; ++i) {
        const int u = i * kLanes / W, w = i * kLanes % W + lane;
        const A deviation = batch.counts(w, u) ? widen(values.slot(u).values[w]) - centers[lane] : A(0);
        added.add(deviation, deviation * deviation);
      }
      sums[lane].add(added.first, added.second);
    }
    found += batch.found();
    load();
  }
  Centered<A> own[kLanes];
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) own[lane] = moments_about(centers[lane], sums[lane], static_cast<A>(found));
  Moments<double> moments;
  double count;
  if (!merge(moments, count, own, found, plan, batch.walk, scratch)) return;
  write_stats(packed, plan.channels, batch.walk.first_channel() + thread_index(), moments, count, words);
}

template <typename T, int W>
struct MaskedStats {
  static constexpr auto planar = masked_stats<T, W, Planar>;
  static constexpr auto interleaved = masked_stats<T, W, Interleaved>;
};

}  // namespace

const char* masked_stats(const void* x, DType dtype, const Geometry& g, const Mask& mask, void* packed,
                         const Words& words, Workspace& workspace, Stream stream) {
  return launch_reduction<MaskedStats, 2>(dtype, g, {x}, workspace, stream, In{x}, WhereOf{&mask}, Out{packed}, words);
}

}  // namespace bagua_syncbn::cuda
