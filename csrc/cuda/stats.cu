// batch_norm_stats: mean and biased variance of each channel and the number of values, packed for sending.
//
// Planar: a block takes a part of a channel, its threads go over slots of it (walk.cuh). Interleaved: a block takes a
// range of rows of a tile of channels, a thread W channels. Either way a thread adds up deviations from a center, its
// own first value, and their squares, those of a batch before they are added to those before. That costs no precision
// where the mean is large beside the deviation; and as the center is one of the values, little where it is far from the
// mean, since then it makes the variance as large. Then sums of threads are made such about one origin for all
// (reduce.cuh). Groups of channels (split.h) are read as an interleaved tensor.

#include "../packed_stats.h"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Sums of deviations from `origin` and of their squares, from those about a center that is `distance` from it.
template <typename A, typename B>
__device__ __forceinline__ Sums<B> sums_about_origin(const Sums<A>& sums, B distance, B count) {
  const B first = sums.first + count * distance;
  return {first, sums.second + distance * (sums.first + first)};
}

// Moments from mean and sum of squared deviations.
__device__ __forceinline__ Sums<double> sums_about(double origin, double mean, double m2, double count) {
  const double difference = mean - origin;
  return {count * difference, m2 + count * difference * difference};
}

// The difference below cancels by the squared distance from mean to origin, in variances. As the origin is one of the
// `count` values, the distance adds at least its square / count to the variance: so much is left of double precision.
template <typename A>
__device__ __forceinline__ void write_stats(A* packed, int64_t channels, int64_t c, double origin,
                                            const Sums<double>& sums, int64_t count, const Words& words) {
  const double difference = sums.first / static_cast<double>(count);
  packed[c] = static_cast<A>(origin + difference);
  packed[channels + c] = static_cast<A>(sums.second / static_cast<double>(count) - difference * difference);
  if (c == 0) pack_count(packed, channels, count, words);
}

// The values of a warp: their number, and their moments about a center, which is one of them.
template <typename A>
struct Warp {
  A center, mean, m2, count;
};

// Merges the sums of its lanes, each about a center of its own. Not in double, see reduce_block(): and it costs no
// precision, since mean and squares are again those of deviations from one of the values.
template <typename A>
__device__ __forceinline__ Warp<A> merge_warp(const Sums<A>& sums, A center, A count) {
  const A pivot = from_first_lane(center), distance = center - pivot, all = add_lanes(count);
  const A mean = add_lanes(sums.first + count * distance) / max(all, A(1));
  const A own = count > 0 ? sums.first / count : 0, difference = distance + own - mean;
  return {pivot, mean, add_lanes(sums.second - sums.first * own + count * difference * difference), all};
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 4)
    planar_stats(Planar plan, const T* x, A* packed, Words words, Scratch scratch) {
  constexpr int kValues = kSlots<W> * W;
  constexpr unsigned kAll = ~0u >> (32 - kValues);
  PlanarWalk<W> walk(plan, false);
  Slot<W> slots[kSlots<W>];
  Pack<T, W> packs[kSlots<W>];
  const auto load = [&] {
    const unsigned valid = next_slots(walk, slots);
    load_slots(walk, x, slots, packs);
    return valid;
  };
  bool more = !walk.done();
  unsigned valid = load();
  const T first_of_channel = x[walk.channel * plan.inner];
  // A slot that is cut short at its beginning is not at its end: no row is so short. The last one of a row can be
  // empty.
  const T own_first = slots[0].last <= 0    ? first_of_channel
                      : slots[0].first == 0 ? packs[0].values[0]
                                            : packs[0].values[W - 1];
  const A center = widen(own_first);
  Sums<A> sums{0, 0};
  int count = 0;
  while (more) {
    if (valid != kAll) replace_others(packs, valid, own_first);  // of which the deviation is zero
    Sums<A> batch{0, 0};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const A deviation = widen(packs[i / W].values[i % W]) - center;
      batch.add(deviation, deviation * deviation);
    }
    sums.add(batch.first, batch.second);
    count += __popc(valid);
    more = !walk.done();
    valid = load();
  }
  const Warp<A> warp = share_warps(merge_warp(sums, center, static_cast<A>(count)));
  const double origin = widen(first_of_channel);
  Sums<double> total{0, 0};
  if (thread_index() < kWarp) {
    const double mean = static_cast<double>(warp.center) + static_cast<double>(warp.mean);
    Sums<double> of_warps[1] = {sums_about(origin, mean, warp.m2, warp.count)};
    double unused = 0;
    reduce_warp(of_warps, unused, 1);
    total = of_warps[0];
  }
  if (!merge_parts(total, plan, walk.channel, walk.part, scratch)) return;
  if (thread_index() == 0)
    write_stats(packed, plan.channels, walk.channel, origin, total, plan.batch * plan.inner, words);
}

template <typename T, int W, typename A>
__device__ __forceinline__ void set_centers(A (&centers)[W], const Pack<T, W>& slot) {
#pragma unroll
  for (int w = 0; w < W; ++w) centers[w] = widen(slot.values[w]);
}

// Adds up the W columns of a thread: deviations from centers, which `begin(slot)` makes of its first slot, and their
// squares. Returns the number of its rows. Where it has no more rows it takes its first once more, of which the
// deviation is zero.
template <typename T, int W, typename A, typename Begin>
__device__ __forceinline__ A add_columns(InterleavedWalk<W>& walk, const T* x, A (&centers)[W], Sums<A> (&sums)[W],
                                         const Begin& begin) {
  int64_t offsets[kSlots<W>];
  Pack<T, W> packs[kSlots<W>];
  bool more = !walk.done();
  A count = static_cast<A>(__popc(next_offsets(walk, offsets)));
  const int64_t own = offsets[0];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) packs[u] = pack_of<T, W>(load_at<W>(x, offsets[u] < 0 ? own : offsets[u]));
  };
  load();
  begin(packs[0]);
  while (more) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
      Sums<A> batch{0, 0};
#pragma unroll
      for (int u = 0; u < kSlots<W>; ++u) {
        const A deviation = widen(packs[u].values[w]) - centers[w];
        batch.add(deviation, deviation * deviation);
      }
      sums[w].add(batch.first, batch.second);
    }
    more = !walk.done();
    count += static_cast<A>(__popc(next_offsets(walk, offsets)));
    load();
  }
  return count;
}

// Blocks for which a multiprocessor has the registers: with more the compiler spills. 0: as many as it sees fit.
template <typename T>
constexpr int kResident = sizeof(T) == 8   ? 3
                          : sizeof(T) == 4 ? 4
                                           : 0;

// One count and one division serve all W channels of a thread.
template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    interleaved_stats(Interleaved plan, const T* x, A* packed, Words words, Scratch scratch) {
  InterleavedWalk<W> walk(plan, false);
  const int64_t channel = walk.tile_begin + thread_index();
  const bool has_channel = thread_index() < plan.columns * W && channel < plan.channels;
  T own_origin;
  A centers[W];
  Sums<A> sums[W] = {};
  A count = add_columns(walk, x, centers, sums, [&](const Pack<T, W>& slot) {
    own_origin = has_channel ? x[channel] : narrow<T>(0);  // waited for after the reduction
    set_centers(centers, slot);
  });
  // Means from here on are those beside the centers of the first row of threads.
  __shared__ A pivots[kTileChannels<W>];
  if (threadIdx.y == 0) {
#pragma unroll
    for (int w = 0; w < W; ++w) pivots[threadIdx.x * W + w] = centers[w];
  }
  __syncthreads();
  const A inverse = count > 0 ? 1 / count : 0;
  Moments<A> moments[W];
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const A mean = sums[w].first * inverse;
    moments[w] = {centers[w] - pivots[threadIdx.x * W + w] + mean, sums[w].second - sums[w].first * mean};
  }
  const Moments<A> sum = reduce_rows<W>(moments, count);
  const double origin = widen(own_origin);
  Sums<double> total{0, 0};
  if (has_channel) total = sums_about(origin, static_cast<double>(pivots[thread_index()]) + sum.mean, sum.m2, count);
  if (!merge_parts(total, plan, walk.tile_begin, W, walk.part, scratch)) return;
  write_stats(packed, plan.channels, channel, origin, total, plan.height, words);
}

// Columns become sums about a center for each of the two channels that a thread may have, and then about the first
// value of the channel.
template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, 2)
    grouped_stats(Grouped plan, const T* x, A* packed, Words words, Scratch) {
  GroupedWalk<W> walk(plan, false);
  const int64_t channel = walk.first_channel() + thread_index();
  const bool has_channel = thread_index() < walk.group();
  T own_origin;
  A centers[W];
  Sums<A> columns[W] = {};
  const A count = add_columns(walk, x, centers, columns, [&](const Pack<T, W>& slot) {
    own_origin = has_channel ? x[channel * plan.inner] : narrow<T>(0);  // waited for after the loop
    set_centers(centers, slot);
  });
  __shared__ double origins[W];
  if (has_channel) origins[thread_index()] = widen(own_origin);
  __syncthreads();
  const Border border = walk.border();
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const A center = w < border.columns ? centers[0] : centers[W - 1];
    columns[w] = sums_about_origin(columns[w], centers[w] - center, count);
  }
  const int here = min(border.columns, W);
  const Two<Sums<A>> sums = by_channel(columns, border);
  const Two<Sums<double>> about_origins = {
      sums_about_origin(sums.here, centers[0] - origins[border.channel], static_cast<double>(count * here)),
      sums_about_origin(sums.next, centers[W - 1] - origins[border.next], static_cast<double>(count * (W - here)))};
  const Sums<double> sum = reduce_group(about_origins, walk, plan);
  if (!has_channel) return;
  write_stats(packed, plan.tiles * plan.group, channel, origins[thread_index()], sum, plan.height * plan.inner, words);
}

template <typename T, int W>
struct Stats {
  static constexpr auto planar = planar_stats<T, W>;
  static constexpr auto interleaved = interleaved_stats<T, W>;
  static constexpr bool groups() { return W > 1; }
  static constexpr auto grouped() { return grouped_stats<T, W>; }
};

}  // namespace

const char* stats(const void* x, DType dtype, const Geometry& g, void* packed, const Words& words, Workspace& workspace,
                  Stream stream) {
  return launch_reduction<Stats>(dtype, g, {x}, workspace, stream, In{x}, Out{packed}, words);
}

}  // namespace bagua_syncbn::cuda
