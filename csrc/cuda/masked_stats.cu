// batch_norm_masked_stats: as stats.cu, of the positions that count.
//
// Threads are mapped to data as there, and add up deviations from a center, their own first value that counts. What is
// not known here is how many values a part has, nor of any value, before it is read, that it counts: so there is no
// origin in common, and threads and parts are merged by mean, sum of squared deviations and count, in double.

#include "../packed_stats.h"
#include "mask.cuh"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

// What a thread has found, from sums about a center.
template <typename A>
__device__ __forceinline__ Moments<double> moments_about(double center, const Sums<A>& sums, double count) {
  if (count == 0) return {0, 0};
  const double shift = sums.first / count;
  return {center + shift, max(0.0, sums.second - shift * sums.first)};
}

// A part leaves two entries for each channel: mean and sum of squared deviations, and the count.
__device__ __forceinline__ void leave(const Scratch& scratch, int64_t entry, const Moments<double>& moments,
                                      double count) {
  scratch.partials[2 * entry] = {moments.mean, moments.m2};
  scratch.partials[2 * entry + 1] = {count, 0};
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

template <typename A>
__device__ __forceinline__ void write_stats(A* packed, int64_t channels, int64_t c, const Moments<double>& moments,
                                            double count, const Words& words) {
  packed[c] = static_cast<A>(moments.mean);
  packed[channels + c] = static_cast<A>(count > 0 ? moments.m2 / count : 0);
  if (c == 0) pack_count(packed, channels, static_cast<int64_t>(count), words);
}

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    planar_masked_stats(Planar plan, const T* x, Mask mask, A* packed, Words words, Scratch scratch) {
  constexpr int kValues = kSlots<W> * W;
  PlanarWalk<W> walk(plan, false);
  const int64_t end = samples_end(plan, false);
  MaskedSlots<kSlots<W>, W> at;
  Pack<T, W> packs[kSlots<W>];
  const auto load = [&] {
    at.next(walk, end);
    load_slots(walk, x, at.slots, packs);
    return at.bits(mask, plan, walk.channel);
  };
  bool more = !walk.done();
  unsigned valid = load();
  A center = 0;
  Sums<A> sums{0, 0};
  int found = 0;
  while (more) {
    if (found == 0) {
#pragma unroll
      for (int i = kValues - 1; i >= 0; --i) {
        if ((valid >> i & 1) != 0) center = widen(packs[i / W].values[i % W]);
      }
    }
    Sums<A> batch{0, 0};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const A deviation = (valid >> i & 1) != 0 ? widen(packs[i / W].values[i % W]) - center : A(0);
      batch.add(deviation, deviation * deviation);
    }
    sums.add(batch.first, batch.second);
    found += __popc(valid);
    more = !walk.done();
    valid = load();
  }
  double count = found;
  Moments<double> moments = moments_about(center, sums, count);
  reduce_block(moments, count);
  const int64_t parts = plan.parts();
  if (parts > 1) {
    if (thread_index() == 0) leave(scratch, walk.part * plan.channels + walk.channel, moments, count);
    if (!arrives_last(scratch.tickets + walk.channel, parts)) return;
    const int threads = blockDim.x * blockDim.y;
    take(moments, count, scratch, plan.channels, walk.channel, thread_index(), threads, parts);
    reduce_block(moments, count);
  }
  if (thread_index() == 0) write_stats(packed, plan.channels, walk.channel, moments, count, words);
}

// Of the last block of a tile: merges what the parts have left. The result for channel t of the tile is that of thread
// t, as in merge_parts.
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

template <typename T, int W, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads)
    interleaved_masked_stats(Interleaved plan, const T* x, Mask mask, A* packed, Words words, Scratch scratch) {
  InterleavedWalk<W> walk(plan, false);
  MaskedRows<kSlots<W>, W> at;
  Pack<T, W> packs[kSlots<W>];
  const auto load = [&] {
    at.next(walk);
    load_offsets(x, at.offsets, packs);
    return at.bits(mask);
  };
  bool more = !walk.done();
  unsigned valid = load();
  A centers[W] = {};
  Sums<A> sums[W] = {};
  int found = 0;
  while (more) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
      if (found == 0) {
#pragma unroll
        for (int u = kSlots<W> - 1; u >= 0; --u) {
          if ((valid >> u & 1) != 0) centers[w] = widen(packs[u].values[w]);
        }
      }
      Sums<A> batch{0, 0};
#pragma unroll
      for (int u = 0; u < kSlots<W>; ++u) {
        const A deviation = (valid >> u & 1) != 0 ? widen(packs[u].values[w]) - centers[w] : A(0);
        batch.add(deviation, deviation * deviation);
      }
      sums[w].add(batch.first, batch.second);
    }
    found += __popc(valid);
    more = !walk.done();
    valid = load();
  }
  double count = found;
  Moments<double> all[W];
#pragma unroll
  for (int w = 0; w < W; ++w) all[w] = moments_about(centers[w], sums[w], count);
  Moments<double> moments = reduce_rows<W>(all, count);
  const int tile = blockDim.x * W;
  const int64_t channel = walk.tile_begin + thread_index();
  const bool has_channel = thread_index() < tile && channel < plan.channels;
  if (plan.parts() > 1) {
    if (has_channel) leave(scratch, walk.part * plan.channels + channel, moments, count);
    if (!arrives_last(scratch.tickets + walk.tile_begin / tile, plan.parts())) return;
    take_tile(moments, count, plan, walk.tile_begin, tile, scratch);
  }
  if (has_channel) write_stats(packed, plan.channels, channel, moments, count, words);
}

template <typename T, int W>
struct MaskedStats {
  static constexpr auto planar = planar_masked_stats<T, W>;
  static constexpr auto interleaved = interleaved_masked_stats<T, W>;
};

}  // namespace

const char* masked_stats(const void* x, DType dtype, const Geometry& g, const Mask& mask, void* packed,
                         const Words& words, Workspace& workspace, Stream stream) {
  return dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    return launch_reduction<MaskedStats, T, 2>(g, {x}, workspace, stream, static_cast<const T*>(x), mask,
                                               static_cast<Accumulate<T>*>(packed), words);
  });
}

}  // namespace bagua_syncbn::cuda
