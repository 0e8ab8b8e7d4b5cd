// batch_norm_stats: mean and biased variance of each channel and the number of values, packed for sending.
//
// Planar: a block takes a part of a channel, its threads go over slots of it (walk.cuh). Interleaved: a block takes a
// range of rows of a tile of channels, a thread W channels. Either way a thread merges batches of values into its own
// mean and sum of squared deviations, by two passes over the batch in registers; then threads and warps are merged, and
// parts are added up (reduce.cuh). All deviations are from a pivot, one value of the part, so that a mean that is large
// beside the deviation costs no precision; that the pivot may be far off costs none either, since each batch has a mean
// of its own.

#include "../packed_stats.h"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Sums of deviations from `origin` and of their squares: what parts of a channel, with an origin that is the same for
// all of them, have only to add up.
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

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_stats(Planar plan, const T* x, A* packed, Words words, Scratch scratch) {
  constexpr int kHere = W == 8 ? 2 : kSlots<W>;  // 16 values in registers; 32 would halve the threads that fit
  constexpr int kValues = kHere * W;
  constexpr unsigned kAll = (1u << kValues) - 1;
  PlanarWalk<W> walk(plan, false);
  Slot<W> slots[kHere];
  Pack<T, W> packs[kHere];
  const auto load = [&] {
    const unsigned valid = next_slots(walk, slots);
    load_slots(walk, x, slots, packs);
    return valid;
  };
  bool more = !walk.done();
  unsigned valid = load();
  const A pivot = widen(x[walk.first_value()]);  // waited for together with the first batch
  Moments<A> moments{0, 0};
  A count = 0;
  while (more) {
    A values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = widen(packs[i / W].values[i % W]) - pivot;
    if (valid == kAll) {
      add_batch(moments, values, kAll, A(kValues), Shares<A>(count, kValues));
      count += kValues;
    } else if (valid != 0) {
      const A added = static_cast<A>(__popc(valid));
      add_batch(moments, values, valid, added, Shares<A>(count, added));
      count += added;
    }
    more = !walk.done();
    valid = load();
  }
  const T first_of_channel = x[walk.channel * plan.inner];  // waited for after the reduction
  reduce_block(moments, count);
  const double origin = widen(first_of_channel);
  Sums<double> sums = sums_about(origin, static_cast<double>(pivot) + moments.mean, moments.m2, count);
  if (!merge_parts(sums, plan, walk.channel, walk.part, scratch)) return;
  if (thread_index() == 0)
    write_stats(packed, plan.channels, walk.channel, origin, sums, plan.batch * plan.inner, words);
}

// A thread has moments of W channels over the same rows, so that one count and one division serve all of them. Each
// channel has its own pivot, the value in the first row of the part.
template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    interleaved_stats(Interleaved plan, const T* x, A* packed, Words words, Scratch scratch) {
  constexpr unsigned kAll = (1u << kSlots<W>)-1;
  InterleavedWalk<W> walk(plan, false);
  const T* first_row = x + walk.first_row() * plan.channels;
  int64_t offsets[kSlots<W>];
  Pack<T, W> packs[kSlots<W>];
  const auto load = [&] {
    const unsigned valid = next_offsets(walk, offsets);
    load_offsets(x, offsets, packs);
    return valid;
  };
  bool more = !walk.done();
  unsigned valid = load();
  const Pack<T, W> first = load_at<W>(first_row, walk.active ? walk.channel : -1);
  A pivots[W];  // waited for together with the first batch
#pragma unroll
  for (int w = 0; w < W; ++w) pivots[w] = widen(first.values[w]);
  Moments<A> moments[W] = {};
  A count = 0;
  while (more) {
    const A added = static_cast<A>(__popc(valid));
    const Shares<A> shares(count, added);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      A values[kSlots<W>];
#pragma unroll
      for (int u = 0; u < kSlots<W>; ++u) values[u] = widen(packs[u].values[w]) - pivots[w];
      if (valid == kAll) {
        add_batch(moments[w], values, kAll, A(kSlots<W>), shares);
      } else {
        add_batch(moments[w], values, valid, added, shares);
      }
    }
    count += added;
    more = !walk.done();
    valid = load();
  }
  const int64_t channel = walk.tile_begin + thread_index();
  const bool has_channel = thread_index() < plan.columns * W && channel < plan.channels;
  const T own_first = has_channel ? first_row[channel] : narrow<T>(0);  // waited for after the reduction
  const T own_origin = has_channel ? x[channel] : narrow<T>(0);
  const Moments<A> sum = reduce_rows<W>(moments, count);
  const double pivot = widen(own_first), origin = widen(own_origin);
  Sums<double> sums = sums_about(origin, pivot + sum.mean, sum.m2, count);
  if (!merge_parts(sums, plan, walk.tile_begin, W, walk.part, scratch)) return;
  write_stats(packed, plan.channels, channel, origin, sums, plan.height, words);
}

template <typename T, int W>
struct Stats {
  static constexpr auto planar = planar_stats<T, W>;
  static constexpr auto interleaved = interleaved_stats<T, W>;
};

}  // namespace

const char* stats(const void* x, DType dtype, const Geometry& g, void* packed, const Words& words, Workspace& workspace,
                  Stream stream) {
  return dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    return launch_reduction<Stats, T>(g, {x}, workspace, stream, static_cast<const T*>(x),
                                      static_cast<Accumulate<T>*>(packed), words);
  });
}

}  // namespace bagua_syncbn::cuda
