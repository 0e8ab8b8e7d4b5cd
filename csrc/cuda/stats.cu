// batch_norm_stats: mean and biased variance of each channel, of all values or of those that a mask counts, and their
// number, packed for sending; and the message of a rank without values.
//
// Planar: a block takes a part of a channel, its threads go over slots of it (walk.cuh). Interleaved: a block takes a
// range of rows of a tile of channels, a thread W channels. Either way a thread adds up deviations from a center, its
// own first value that counts, and their squares, a batch at a time. This costs no precision where the mean is large
// beside the deviation; and as the center is one of the values, little where it is far from the mean, since then it
// makes the variance as large. The threads of a block are merged by center, mean beside it, sum of squared deviations
// and count. Parts are merged in double: without a mask as sums about the first value of the channel.

#include "../packed_stats.h"
#include "batch.cuh"
#include "reduce.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, typename Plan, bool kMasked>
struct Traits {
  // Blocks for which a multiprocessor has the registers: with more, the compiler spills on some card.
  static constexpr int resident() {
    if (kMasked) return 2;
    if (std::is_same_v<Plan, Planar> || sizeof(T) == 4) return 4;
    return sizeof(T) == 8 ? 3 : 2;
  }
};

template <typename T, int W, typename Plan, bool kMasked, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, Traits<T, Plan, kMasked>::resident())
    stats(Plan plan, const T* x, Mask mask, void* packed, Words words, Scratch scratch) {
  using Slots = Batch<Plan, W, kSlots<W>, kMasked>;
  constexpr int kLanes = Slots::kLanes, kValues = kSlots<W> * W / kLanes;
  Slots batch(plan, false, mask);
  Loaded<T, W, kSlots<W>, Read::kAgain> values;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    batch.read_mask();
  };
  load();
  const int64_t channel = batch.walk.first_channel() + thread_index();  // if this thread writes one
  T first_of_channel = narrow<T>(0);                                    // waited for after the reduction
  if (!kMasked && batch.walk.writes()) first_of_channel = x[channel * plan.channel_stride()];
  A centers[kLanes] = {};
  Sums<A> sums[kLanes] = {};
  unsigned count = 0;
  while (batch.any) {
    if (count == 0) {
#pragma unroll
      for (int i = kSlots<W> * W - 1; i >= 0; --i) {
        if (batch.counts(i % W, i / W)) centers[i % kLanes] = widen(values.slot(i / W).values[i % W]);
      }
    }
    // The other values become centers, with a deviation of zero. A branch for each value would diverge in most warps.
    if (!batch.full()) values.replace(batch, centers);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      Sums<A> added{0, 0};
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const A value = widen(values.slot(i * kLanes / W).values[i * kLanes % W + lane]);
        added.add(value - centers[lane], (value - centers[lane]) * (value - centers[lane]));
      }
      sums[lane].add(added.first, added.second);
    }
    count += batch.found();
    if (batch.walk.done()) break;
    load();
  }
  const A inverse = count > 0 ? 1 / static_cast<A>(count) : 0;
  Centered<A> own[kLanes];
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    const A mean = sums[lane].first * inverse;
    own[lane] = {centers[lane], mean, max(A(0), sums[lane].second - mean * sums[lane].first)};
  }
  const double2 of_block = reduce_threads(batch.walk, own, count).packed();
  double all = count;
  if constexpr (kMasked) {
    Centered<double> total = Centered<double>::unpacked(of_block);
    if (!merge_parts(total, all, plan, batch.walk, scratch)) return;
    const double2 moments = total.packed();
    pack_moments<A>(packed, plan.channels, channel, moments.x, moments.y, all, words);
  } else {
    const double origin = widen(first_of_channel), distance = of_block.x - origin;
    Sums<double> total{all * distance, of_block.y + all * distance * distance};
    if (!merge_parts(total, all, plan, batch.walk, scratch)) return;
    // This cancels by the squared distance from mean to origin, in variances. As the origin is one of the values, the
    // distance adds at least its square / count to the variance: so much is left of double precision.
    all = static_cast<double>(plan.values_of_channel());
    const double difference = total.first / all;
    pack_moments<A>(packed, plan.channels, channel, origin + difference, total.second - total.first * difference, all,
                    words);
  }
}

template <typename A>
__global__ void __launch_bounds__(kThreads) write_zeros(A* target, int64_t zeros, const Words words) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < zeros) target[i] = A(0);
  if (i == 0) pack_words(target + zeros, words);
}

template <bool kMasked>
struct Stats {
  static constexpr int kEntries = kMasked ? 2 : 1;
  template <typename T, int W, typename Plan>
  static constexpr auto kernel = stats<T, W, Plan, kMasked>;
};

}  // namespace

void stats(const void* x, DType dtype, const Geometry& g, const Mask* mask, void* packed, const Words& words,
           Device& device) {
  const auto start = [&](auto op) {
    launch_reduction<decltype(op)>(dtype, g, {x}, device, x, mask == nullptr ? Mask{} : *mask, packed, words);
  };
  return mask != nullptr ? start(Stats<true>()) : start(Stats<false>());
}

void zeros_and(const Words& words, void* target, int64_t zeros, DType accumulate, Device& device) {
  dispatch(accumulate, [&](auto value) {
    using Write = Kernel<write_zeros<Accumulate<decltype(value)>>>;
    Write::launch({ceil_div(zeros + 1, kThreads), 1}, {kThreads, 1}, device.stream, target, zeros, words);
  });
}

}  // namespace bagua_syncbn::cuda
