// batch_norm_stats: per-channel mean, biased variance and count, optionally with a mask, packed for the exchange.
//
// Each thread takes its first valid value as its center, and sums the deviations from it and their squares, one batch
// at a time. This stays precise if the mean is large compared to the deviation. An outlier as the center does little
// harm, because it also increases the variance. The block merges its threads' moments, and merge_stats merges parts in
// double.

#include "../packed_stats.h"
#include "batch.cuh"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Moments of a channel's part.
struct StatsPart {
  double mean, m2, count;
};

template <typename Traits>
__global__ void __launch_bounds__(kThreads, Traits::resident())
    stats_kernel(typename Traits::Plan plan, const typename Traits::T* x, const uint8_t* mask, StatsPart* parts,
                 void* packed, Header header) {
  using A = typename Traits::A;
  constexpr int kSlots = Traits::kSlots, kWidth = Traits::kWidth, kLanes = Traits::kLanes;
  Batch<Traits> batch(plan, false, mask);
  Loaded<Traits> values;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    batch.read_mask();
  };
  load();
  Moments<A, kLanes> moments{};
  Sums<A, kLanes> sums{};
  while (batch.any) {
    if (moments.count == 0) {
#pragma unroll
      for (int i = kSlots * kWidth - 1; i >= 0; --i) {
        const A value = widen(values.slot(i / kWidth).values[i % kWidth]);
        if (batch.counts(i % kWidth, i / kWidth)) moments.center[i % kLanes] = value;
      }
    }
    // Centers replace invalid values, so the deviation is zero. A branch per value would diverge in most warps.
    if (!batch.full()) values.replace(batch, moments.center);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      Sums<A, 1> added{};
#pragma unroll
      for (int i = lane; i < kSlots * kWidth; i += kLanes) {
        const A deviation = widen(values.slot(i / kWidth).values[i % kWidth]) - moments.center[lane];
        added.add(0, deviation, deviation * deviation);
      }
      sums.add(lane, added.first[0], added.second[0]);
    }
    moments.count += batch.count();
    if (batch.walk.done()) break;
    load();
  }
  const A inverse = moments.count > 0 ? 1 / static_cast<A>(moments.count) : 0;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    moments.mean[lane] = sums.first[lane] * inverse;
    moments.m2[lane] = max(A(0), sums.second[lane] - moments.mean[lane] * sums.first[lane]);
  }
  const Moments<A, 1> total = reduce_block<Traits::kTile>(moments, batch.walk.columns());
  const int64_t c = batch.walk.own_channel();
  if (c < 0) return;
  const double mean = static_cast<double>(total.center[0]) + static_cast<double>(total.mean[0]);
  if (parts != nullptr) {
    parts[c * plan.parts + batch.walk.part] = {mean, static_cast<double>(total.m2[0]),
                                               static_cast<double>(total.count)};
  } else {
    pack_moments<A>(packed, plan.channels, c, mean, total.m2[0], total.count, header);
  }
}

// Sums over parts, relative to the mean of the first part with values: the variance of equal values is exactly 0.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    merge_stats(int64_t count, const StatsPart* parts, int64_t channels, void* packed, Header header) {
  const StatsPart* own = parts + blockIdx.x * count;
  int64_t first = 0;
  while (first + 1 < count && own[first].count == 0) ++first;
  const double origin = own[first].mean;
  Sums<double, 1> values{}, squares{};
  for (int64_t p = threadIdx.x; p < count; p += blockDim.x) {
    const double weight = own[p].count, difference = own[p].mean - origin;
    values.add(0, weight, weight * difference);
    squares.add(0, own[p].m2 + weight * difference * difference, 0);
  }
  values = reduce_block(values);
  __syncthreads();
  squares = reduce_block(squares);
  if (threadIdx.x != 0) return;
  const double shift = values.second[0] / max(values.first[0], 1.0);
  const double m2 = squares.first[0] - shift * values.second[0];
  pack_moments<A>(packed, channels, blockIdx.x, origin + shift, m2 < 0 ? 0 : m2, values.first[0], header);
}

}  // namespace

void stats(const void* x, DType dtype, const Geometry& g, const uint8_t* mask, void* packed, const Header& header,
           Device& device) {
  const auto start = [&](auto traits, const auto& plan) {
    using Chosen = decltype(traits);
    StatsPart* const parts = allocate_parts<StatsPart>(device, plan);
    Kernel<stats_kernel<Chosen>>::launch(plan.grid(), plan.block(), device.stream, plan, x, mask, parts, packed,
                                         header);
    if (parts != nullptr) launch_merge<merge_stats<typename Chosen::A>>(device, plan, parts, packed, header);
  };
  if (mask != nullptr) return choose_kernel<Op::kStats, true, false>(dtype, g, {x}, start);
  choose_kernel<Op::kStats, false, false>(dtype, g, {x}, start);
}

}  // namespace bagua_syncbn::cuda
