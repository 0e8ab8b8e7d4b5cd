// Reductions over the threads of a block and over the blocks of a channel. The order of every sum is fixed, so results
// do not depend on scheduling.
#pragma once

#include "launch.cuh"
#include "walk.cuh"

namespace bagua_syncbn::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Returns the `value` of the lane `distance` after this one. Called by all lanes of a warp.
template <typename V>
__device__ __forceinline__ V from_lane_after(const V& value, int distance) {
  constexpr int kWords = sizeof(V) / sizeof(unsigned);
  unsigned words[kWords];
  memcpy(words, &value, sizeof(words));
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = __shfl_down_sync(kAllLanes, words[w], distance);
  V result;
  memcpy(static_cast<void*>(&result), words, sizeof(words));
  return result;
}

// Mean and sum of squared deviations (m2) for each of a thread's channels, over `count` values. The mean is relative to
// a center (one of the values), so it is as precise as deviations from the center.
template <typename A, int kLanes>
struct Moments {
  A center[kLanes], mean[kLanes], m2[kLanes];
  std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t> count;  // an integer, to be exact beyond 2^24

  // The update of Chan, Golub and LeVeque.
  __device__ __forceinline__ void merge(const Moments& other) {
    const A own = static_cast<A>(count), added = static_cast<A>(other.count);
    const A share = added > 0 ? added / (own + added) : 0, cross = own * share;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const A difference = (other.center[i] - center[i]) + (other.mean[i] - mean[i]);
      m2[i] += other.m2[i] + difference * difference * cross;
      mean[i] = share == 1 ? other.mean[i] : mean[i] + difference * share;
      center[i] = share == 1 ? other.center[i] : center[i];
    }
    count += other.count;
  }
  __device__ __forceinline__ Moments<A, 1> lane(int i) const { return {{center[i]}, {mean[i]}, {m2[i]}, count}; }
};

// Two sums for each of a thread's channels.
template <typename A, int kLanes>
struct Sums {
  A first[kLanes], second[kLanes];

  __device__ __forceinline__ void add(int i, A a, A b) {
    first[i] += a;
    second[i] += b;
  }
  __device__ __forceinline__ void merge(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) add(i, other.first[i], other.second[i]);
  }
  __device__ __forceinline__ Sums<A, 1> lane(int i) const { return {{first[i]}, {second[i]}}; }
};

// Merges `value` over a block's threads that share channels. Threads form rows of `columns` threads. A block has at
// most kTile channels, a thread kLanes of them. Thread t gets the result for channel t. Called by all threads, with a
// barrier between two calls.
template <int kTile = 1, template <typename, int> typename S, typename A, int kLanes>
__device__ __forceinline__ S<A, 1> reduce_block(S<A, kLanes> value, int columns = 1) {
  __shared__ S<A, kLanes> of_warps[kThreads / kWarp][kTile / kLanes];
  const int thread = thread_index(), lane = thread % kWarp, warps = blockDim.x * blockDim.y / kWarp;
#pragma unroll 1
  for (int distance = kWarp / 2; distance >= columns; distance /= 2) value.merge(from_lane_after(value, distance));
  if (lane < columns) of_warps[thread / kWarp][lane] = value;
  __syncthreads();
  S<A, 1> result{};
  if (thread < columns * kLanes) {
    for (int i = 0; i < warps; ++i) result.merge(of_warps[i][thread / kLanes].lane(thread % kLanes));
  }
  return result;
}

// Allocates the parts' results, which a second kernel merges; null if there is one part.
template <typename Part, typename Plan>
Part* allocate_parts(Device& device, const Plan& plan) {
  if (plan.parts == 1) return nullptr;
  return reinterpret_cast<Part*>(device.allocate(plan.parts * plan.channels * (sizeof(Part) / sizeof(double))));
}

// Launches kMerge, with a block per channel, to merge the parts' results.
template <auto kMerge, typename Plan, typename Part, typename... Arguments>
void launch_merge(const Device& device, const Plan& plan, const Part* parts, const Arguments&... arguments) {
  const dim3 threads(power_of_two(plan.parts, kWarp, kThreads));
  Kernel<kMerge>::launch(dim3(plan.channels), threads, device.stream, plan.parts, parts, plan.channels, arguments...);
}

}  // namespace bagua_syncbn::cuda
