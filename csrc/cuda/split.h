// The split of a tensor over blocks and threads. It depends on sizes and alignment alone, not on the card or on what
// else runs there; so the results do not either.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "../host_device.h"
#include "../layout.h"

namespace bagua_syncbn::cuda {

// Most threads of a block, and threads of a warp.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Bytes of the widest load that all cards have.
constexpr int kVectorBytes = 16;
// Most values of a vector: a thread keeps a bit for each value of a batch in 32 bits.
constexpr int64_t kMostValues = 8;
// Bytes of a row per interleaved block: a cache line; half of one in a reduction, which memory still delivers at full
// speed. Then more threads of a block share a channel, and fewer parts are left to merge.
constexpr int kLineBytes = 128;
constexpr int kReducedBytes = 64;

// Blocks per launch. Element-wise: several waves on the largest cards. Reductions: one wave, four blocks on each of 132
// multiprocessors, since a block costs a batch or two to begin and end, and its result has to be merged.
constexpr int64_t kReduceBlocks = 528;
constexpr int64_t kElementBlocks = 4096;
// Blocks of an interleaved reduction, which leave more to merge: three on each multiprocessor.
constexpr int64_t kReduceRowBlocks = 396;
// Two blocks on each multiprocessor: while there are fewer, parts get smaller, down to a batch for each thread.
constexpr int64_t kFewBlocks = 264;
// Vectors that a thread loads before it uses the first.
constexpr int kBatch = 4;
// Fewest slots for each thread of a part, once there are kFewBlocks blocks.
constexpr int64_t kFewestSlots = kBatch + kBatch / 2;
// Most values of a planar row, slots of a planar channel, and rows of an interleaved part.
constexpr int64_t kMost = int64_t(1) << 30;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Values of a vector, by the size of one.
constexpr int64_t vector_width(int64_t value_size) {
  return std::min(kVectorBytes / value_size, kMostValues);
}

// The smallest power of two from `value` on, in [low, high], which are powers of two.
inline int64_t power_of_two(int64_t value, int64_t low, int64_t high) {
  int64_t power = low;
  while (power < value && power < high) power *= 2;
  return power;
}

// The split of `count` slots or rows over `parts` blocks of `threads`.
//
// Elementwise, where more blocks are launched than run at a time: contiguous ranges of nearly equal length. Reductions,
// where all blocks run together: strided, one slot for each thread of a part in each turn, so that the tail of the
// tensor stays cached for the next pass. The host divides: on the device a division takes longer than everything else
// before the first load.
struct Sharing {
  int64_t count;
  int64_t length;  // of a range, or of a turn
  int64_t longer;  // number of ranges, the first ones, that are longer by one
  int64_t step;    // from a slot or row of a thread to its next
  bool in_turns;

  Sharing(int64_t count, int64_t parts, int64_t threads, bool in_turns)
      : count(count),
        length(in_turns ? threads : count / parts),
        longer(in_turns ? 0 : count % parts),
        step(in_turns ? parts * threads : threads),
        in_turns(in_turns) {}
  BAGUA_SYNCBN_HOST_DEVICE int64_t begin_of(int64_t part) const {
    return part * length + (part < longer ? part : longer);
  }
  BAGUA_SYNCBN_HOST_DEVICE int64_t end_of(int64_t part) const { return in_turns ? count : begin_of(part + 1); }
};

// Blocks of a grid, or threads of a block. Blocks run in about the order of x, then y, as memory is laid out.
struct Extent {
  int64_t x, y;
};

// Planar. A block takes a part of the slots of a channel. Slots are aligned vectors in memory; the first and the last
// of a row may reach beyond it.
struct Planar {
  int64_t batch;
  int64_t channels;
  int64_t inner;
  int64_t slots;    // of a row
  int64_t parts;    // of a channel
  int64_t threads;  // of a block
  Sharing sharing{1, 1, 1, false};
  uint32_t inverse = 0;           // 2^32 / slots, to divide by
  int slots_on = 0, rows_on = 0;  // from a slot of a thread to its next
  int64_t values_on = 0;          // as rows_on, in values
  int64_t row_step = 0;           // from a row of a channel to its next, in values
  int misaligned = 0;             // values between the aligned address before the tensor and its begin
  bool cut_before = false;        // whether the first slot begins before the tensor
  bool cut_after = false;         // whether the last slot ends after it

  Extent grid() const { return {channels, parts}; }
  Extent block() const { return {threads, 1}; }
};

// Interleaved. A block has a tile of channels and some of the rows.
struct Interleaved {
  int64_t height;  // rows of the tensor
  int64_t channels;
  int64_t tiles;
  int64_t parts;    // of a tile
  int64_t columns;  // threads along a row
  int64_t rows;     // threads across rows
  Sharing sharing{1, 1, 1, false};
  int64_t step = 0;  // from a slot of a thread to its next

  Extent grid() const { return {tiles, parts}; }
  Extent block() const { return {columns, rows}; }
};

// Returns the number of parts of each of `units` channels or tiles, where a thread of a single part has `slots` slots.
inline int64_t parts_of(int64_t units, int64_t slots, int64_t width, bool reduces) {
  const int64_t least = width == 1 ? kBatch : kBatch / 2;  // a batch of two tensors
  const int64_t several = slots / kFewestSlots;
  const int64_t fill = std::min(slots / least, ceil_div(kFewBlocks, units));
  const int64_t most = reduces ? kReduceBlocks : kElementBlocks;
  return std::max<int64_t>(1, std::min(most / units, std::max(several, fill)));
}

// Whether 16 bytes at a time can be loaded from all of these. Planar rows may begin anywhere, if in all tensors alike.
inline bool takes_vectors(const Geometry& g, int64_t value_size, std::initializer_list<const void*> addresses) {
  const int64_t width = vector_width(value_size);
  const auto offset = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes; };
  const auto first = offset(*addresses.begin());
  const auto same = [&](const void* address) { return offset(address) == first; };
  if (!std::all_of(addresses.begin(), addresses.end(), same) || first % value_size != 0) return false;
  if (g.interleaved) return first == 0 && g.channels % width == 0;
  const bool aligned = first == 0 && g.inner % width == 0;
  return aligned || g.inner >= 4 * width;  // shorter rows are mostly ends
}

inline Planar split_planar(const Geometry& g, int64_t width, int misaligned, bool reduces) {
  const bool aligned = misaligned == 0 && g.inner % width == 0;
  const int64_t slots = aligned ? g.inner / width : ceil_div(g.inner + width - 1, width), all = g.batch * slots;
  Planar plan{g.batch, g.channels, g.inner, slots, parts_of(g.channels, all / kThreads, width, reduces), kThreads};
  // Where blocks fill the card, small ones, so that a thread has something to do beside beginning and ending.
  const int64_t slots_of_thread = plan.parts * g.channels >= kFewBlocks ? kBatch : kBatch / 2;
  plan.threads = power_of_two(ceil_div(ceil_div(all, plan.parts), slots_of_thread), kWarp, kThreads);
  plan.sharing = {all, plan.parts, plan.threads, reduces};
  plan.inverse = static_cast<uint32_t>(UINT32_MAX / slots);
  plan.slots_on = static_cast<int>(plan.sharing.step % slots);
  plan.rows_on = static_cast<int>(plan.sharing.step / slots);
  plan.row_step = g.channels * g.inner;
  plan.values_on = plan.rows_on * plan.row_step;
  plan.misaligned = misaligned;
  plan.cut_before = misaligned != 0;
  plan.cut_after = (misaligned + g.batch * g.channels * g.inner) % width != 0;
  return plan;
}

// Whether a thread can count in 32 bits. Larger inputs, as with rows of more than 2^30 values, are refused.
inline bool fits(const Planar& plan) {
  return plan.inner <= kMost && plan.batch < kMost && plan.batch * plan.slots < kMost;
}

inline bool fits(const Interleaved& plan) {
  return ceil_div(plan.height, plan.parts) < kMost;
}

inline Interleaved split_interleaved(const Geometry& g, int64_t width, bool reduces) {
  Interleaved plan{g.rows(), g.channels, 1, 1, 1, 1};
  const int64_t slots = ceil_div(g.channels, width);
  const int64_t bytes = reduces ? kReducedBytes : kLineBytes;
  plan.columns = power_of_two(slots, 1, width == 1 ? kWarp : bytes / kVectorBytes);
  plan.tiles = ceil_div(slots, plan.columns);
  const int64_t threads = power_of_two(plan.columns * plan.height, 64, kThreads);  // one for each channel of a tile
  plan.rows = threads / plan.columns;
  const int64_t slots_of_thread = plan.height / plan.rows;
  plan.parts = parts_of(plan.tiles, slots_of_thread, width, reduces);
  if (reduces) plan.parts = std::max<int64_t>(1, std::min(plan.parts, kReduceRowBlocks / plan.tiles));
  plan.sharing = {plan.height, plan.parts, plan.rows, reduces && plan.height < kMost};
  plan.step = plan.sharing.step * plan.channels;
  return plan;
}

}  // namespace bagua_syncbn::cuda
