// Sums that are merged: of threads of a warp by shuffles, of warps in shared memory, of blocks by the last to arrive.
// The order is fixed at every level, so the result does not depend on scheduling.
#pragma once

#include "split.h"
#include "values.cuh"
#include "walk.cuh"

namespace bagua_syncbn::cuda {

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

// Mean and sum of squared deviations.
template <typename A>
struct Moments {
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

// Sums of dy and of dy * (x - mean). Counts do not matter to them.
template <typename A>
struct GradSums {
  static constexpr bool kCounted = false;
  A dy;
  A dy_xmu;

  __device__ __forceinline__ void merge(const GradSums& other, const Shares<A>&) {
    dy += other.dy;
    dy_xmu += other.dy_xmu;
  }
  __device__ __forceinline__ GradSums of_lane_after(int distance) const {
    return {from_lane_after(dy, distance), from_lane_after(dy_xmu, distance)};
  }
};

// Merges `values`, W sums over `count` values each, of every `stride`-th lane; the results are those of the first
// `stride` lanes. All lanes of the warp take part.
template <int W, typename S, typename A>
__device__ __forceinline__ void reduce_warp(S (&values)[W], A& count, int stride) {
  for (int distance = kWarp / 2; distance >= stride; distance /= 2) {
    const A other = S::kCounted ? from_lane_after(count, distance) : A(0);
    const Shares<A> shares(count, other);
#pragma unroll
    for (int w = 0; w < W; ++w) values[w].merge(values[w].of_lane_after(distance), shares);
    count += other;
  }
}

// Merges the sums of all threads of the block; the result is that of thread 0.
template <typename S, typename A>
__device__ void reduce_block(S& value, A& count) {
  __shared__ S values[kThreads / kWarp];
  __shared__ A counts[kThreads / kWarp];
  const int thread = thread_index(), lane = thread % kWarp, warp = thread / kWarp;
  const int warps = blockDim.x * blockDim.y / kWarp;
  S single[1] = {value};
  reduce_warp(single, count, 1);
  if (lane == 0) {
    values[warp] = single[0];
    counts[warp] = count;
  }
  __syncthreads();
  if (warp == 0) {
    single[0] = lane < warps ? values[lane] : S{};
    count = lane < warps ? counts[lane] : 0;
    reduce_warp(single, count, 1);
  }
  value = single[0];
  __syncthreads();  // before the next call writes there
}

// Whether this block is the last of `parts` to arrive at `ticket`. Then it sees what the others wrote before.
//
// Why the fences suffice: each thread orders its own partial results before the barrier (first fence), the barrier
// orders them before thread 0's increment, and increments of one counter are ordered among all blocks. The block that
// draws the last number is thus after all partial results, and the second fence keeps its reads after that. It reads
// with __ldcg, from L2, where fences meet: L1 might hold what lay there before.
// The counter wraps to zero at the last increment, so the next kernel on the stream finds it as this one did.
__device__ inline bool arrives_last(uint32_t* ticket, int64_t parts) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (thread_index() == 0) {
    const unsigned highest = static_cast<unsigned>(parts - 1);
    last = atomicInc(ticket, highest) == highest;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// The memory of a reduction over `parts` of each channel; none where there is one.
struct Scratch {
  double* partials = nullptr;
  uint32_t* tickets = nullptr;

  Scratch(Workspace& workspace, int64_t parts, int64_t channels) {
    if (parts == 1) return;
    partials = workspace.partials(3 * parts * channels);
    tickets = workspace.tickets();
  }
};

// What a part leaves for the last block.
template <typename S>
struct Partial {
  S value;
  double count;
};

template <typename S>
__device__ __forceinline__ void write_partial(double* partials, int64_t index, const S& value, double count) {
  reinterpret_cast<Partial<S>*>(partials)[index] = {value, count};
}

template <typename S>
__device__ __forceinline__ void merge_partial(const double* partials, int64_t index, S& value, double& count) {
  const double* address = partials + 3 * index;
  const double fields[] = {__ldcg(address), __ldcg(address + 1), __ldcg(address + 2)};
  Partial<S> other;
  static_assert(sizeof(other) == sizeof(fields), "two values and a count");
  memcpy(&other, fields, sizeof(other));
  value.merge(other.value, Shares<double>(count, other.count));
  count += other.count;
}

// Planar: merges what thread 0 of each part has. Whether this block has the result, in thread 0.
template <typename S>
__device__ bool merge_parts(S& value, double& count, const Planar& plan, const int64_t channel, int64_t part,
                            double* partials, uint32_t* tickets) {
  const int64_t parts = plan.along_batch * plan.along_inner;
  if (parts == 1) return true;
  if (thread_index() == 0) write_partial(partials, part * plan.channels + channel, value, count);
  if (!arrives_last(tickets + channel, parts)) return false;
  value = {};
  count = 0;
  for (int64_t p = thread_index(); p < parts; p += blockDim.x * blockDim.y) {
    merge_partial(partials, p * plan.channels + channel, value, count);
  }
  reduce_block(value, count);
  return true;
}

// Interleaved: merges the sums that the threads of a block have for their W channels; the result for channel t of the
// tile is that of thread t.
template <int W, typename S, typename A>
__device__ S reduce_rows(S (&values)[W], A& count) {
  __shared__ S rows[kThreads / kWarp][kTile<W>];
  __shared__ A counts[kThreads / kWarp];
  const int thread = thread_index(), lane = thread % kWarp, warp = thread / kWarp;
  const int lanes = blockDim.x, warps = blockDim.x * blockDim.y / kWarp;
  reduce_warp(values, count, lanes);
  if (lane < lanes) {
#pragma unroll
    for (int w = 0; w < W; ++w) rows[warp][lane * W + w] = values[w];
    if (lane == 0) counts[warp] = count;
  }
  __syncthreads();
  S result{};
  count = 0;
  if (thread < lanes * W) {
    for (int i = 0; i < warps; ++i) {
      result.merge(rows[i][thread], Shares<A>(count, counts[i]));
      count += counts[i];
    }
  }
  return result;
}

// Interleaved: merges what thread t of each part has for channel t of the tile. Whether this thread has a result.
template <typename S>
__device__ bool merge_parts(S& value, double& count, const Interleaved& plan, int64_t tile_begin, int width,
                            int64_t part, double* partials, uint32_t* tickets) {
  const int thread = thread_index(), tile = blockDim.x * width;
  const bool has_channel = thread < tile && tile_begin + thread < plan.channels;
  if (plan.parts == 1) return has_channel;
  if (has_channel) write_partial(partials, part * plan.channels + tile_begin + thread, value, count);
  if (!arrives_last(tickets + tile_begin / tile, plan.parts)) return false;
  // Thread t takes every groups-th part of channel t % tile, and the groups are merged by halves.
  const int group = thread / tile, groups = blockDim.x * blockDim.y / tile;
  const int64_t channel = tile_begin + thread % tile;
  value = {};
  count = 0;
  for (int64_t p = group; channel < plan.channels && p < plan.parts; p += groups) {
    merge_partial(partials, p * plan.channels + channel, value, count);
  }
  __shared__ Partial<S> rest[kThreads];
  for (int half = groups / 2; half > 0; half /= 2) {
    rest[thread] = {value, count};
    __syncthreads();
    if (group < half) {
      const Partial<S>& other = rest[thread + half * tile];
      value.merge(other.value, Shares<double>(count, other.count));
      count += other.count;
    }
    __syncthreads();
  }
  return has_channel;
}

}  // namespace bagua_syncbn::cuda
