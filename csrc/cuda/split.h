// Splits a tensor over blocks and threads. The split depends only on sizes and alignment, so results do not depend on
// the card or on concurrent work.
#pragma once

#include <vector_types.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "../arguments.h"

namespace bagua_syncbn::cuda {

// Threads: maximum per block, and per warp.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Bytes per vector: the widest load that all cards support. A batch of vectors has at most 32 values, so a 32-bit
// integer holds a bit for each value.
constexpr int kVectorBytes = 16;
// Row bytes per interleaved block: a cache line. In reductions half a line, which memory still delivers at full speed:
// more threads share a channel, so fewer parts need to be merged.
constexpr int kLineBytes = 128;
constexpr int kReducedBytes = 64;

// Blocks per launch, unless there are more channels. Element-wise kernels: several waves on the largest cards.
// Reductions: one wave of four blocks (interleaved, which needs more registers: three) on each of 132 multiprocessors.
// Starting, finishing and merging a block takes as long as one or two batches.
constexpr int64_t kElementBlocks = 4096;
constexpr int64_t kReduceBlocks = 528;
constexpr int64_t kReduceRowBlocks = 396;
// Two blocks per multiprocessor. Launches of fewer blocks use smaller parts, down to a batch per thread.
constexpr int64_t kFewBlocks = 264;
// Vectors that a thread loads before it uses the first value.
constexpr int kBatch = 4;
// Minimum slots per thread and part, unless smaller parts are needed for kFewBlocks blocks.
constexpr int64_t kFewestSlots = kBatch + kBatch / 2;
// Maximum values per planar row, slots per planar channel, and rows per interleaved part: a thread needs only 32-bit
// indices.
constexpr int64_t kMost = int64_t(1) << 30;

inline void expect(bool success, const char* problem) {
  if (!success) throw std::runtime_error(std::string("CUDA: expected success, got ") + problem);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Rounds `value` up to a power of two within [low, high], which are powers of two.
inline int64_t power_of_two(int64_t value, int64_t low, int64_t high) {
  int64_t power = low;
  while (power < value && power < high) power *= 2;
  return power;
}

// Splits `count` slots or rows over `parts` blocks with `threads` threads.
//
// Element-wise kernels launch more blocks than run at a time; each block gets a contiguous range of nearly equal
// length. The blocks of a reduction run at the same time, if they fit: they move through the tensor together, one slot
// per thread at a time, so that its tail stays cached for the next pass. Divisions are done on the host: one on the
// device would take longer than all other work before the first load.
struct Sharing {
  int64_t count;
  int64_t length;  // range or turn
  int64_t longer;  // the first `longer` ranges have one slot or row more
  int64_t step;    // to the next slot or row of a thread
  bool in_turns;

  BAGUA_SYNCBN_HOST_DEVICE int64_t begin_of(int64_t part) const {
    return part * length + (part < longer ? part : longer);
  }
  BAGUA_SYNCBN_HOST_DEVICE int64_t end_of(int64_t part) const { return in_turns ? count : begin_of(part + 1); }
};

inline Sharing share(int64_t count, int64_t parts, int64_t threads, bool in_turns) {
  if (in_turns) return {count, threads, 0, parts * threads, true};
  return {count, count / parts, count % parts, threads, false};
}

// Planar: a block takes some slots of a channel. Slots are aligned vectors in memory; the first and last slot of a row
// may extend beyond the row.
struct Planar {
  int64_t channels;
  int64_t inner;
  int64_t slots;    // per row
  int64_t parts;    // per channel
  int64_t threads;  // per block
  Sharing sharing{};
  uint32_t inverse = 0;           // 2^32 / slots, to divide by
  int slots_on = 0, rows_on = 0;  // to the next slot of a thread
  int64_t values_on = 0;          // rows_on in values
  int64_t row_step = 0;           // values to the next row of a channel
  int misaligned = 0;             // values from an aligned address, where the first slot starts, to the tensor
  bool cut_after = false;         // whether the last slot ends after the tensor

  // Blocks run roughly in the order of x, then y, which is memory order.
  dim3 grid() const { return dim3(channels, parts); }
  dim3 block() const { return dim3(threads); }
};

// Interleaved: a block takes some rows of a tile of channels.
struct Interleaved {
  int64_t channels;
  int64_t tiles;
  int64_t parts;    // per tile
  int64_t columns;  // threads along a row
  int64_t rows;     // threads across rows
  Sharing sharing{};
  int64_t step = 0;  // values to the next slot of a thread

  dim3 grid() const { return dim3(tiles, parts); }
  dim3 block() const { return dim3(columns, rows); }
};

// Returns the number of parts per unit, a channel or tile. `slots`: slots per thread if there is one part.
inline int64_t parts_of(int64_t units, int64_t slots, int64_t width, bool reduces) {
  const int64_t least = width == 1 ? kBatch : kBatch / 2;  // a batch of two tensors
  const int64_t several = slots / kFewestSlots;
  const int64_t fill = std::min(slots / least, ceil_div(kFewBlocks, units));
  const int64_t most = reduces ? kReduceBlocks : kElementBlocks;
  return std::max<int64_t>(1, std::min(most / units, std::max(several, fill)));
}

// Whether the kernels can load vectors from these addresses. Planar rows may be misaligned if all tensors are
// misaligned by the same amount.
inline bool takes_vectors(const Geometry& g, int64_t value_size, std::initializer_list<const void*> addresses) {
  const int64_t width = kVectorBytes / value_size;
  const auto offset = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes; };
  const auto first = offset(*addresses.begin());
  const auto same = [&](const void* address) { return offset(address) == first; };
  if (!std::all_of(addresses.begin(), addresses.end(), same) || first % value_size != 0) return false;
  if (g.interleaved) return first == 0 && g.channels % width == 0;
  const bool aligned = first == 0 && g.inner % width == 0;
  return aligned || g.inner >= 4 * width;  // shorter rows have mostly partial slots
}

inline Planar split_planar(const Geometry& g, int64_t width, int misaligned, bool reduces) {
  const bool aligned = misaligned == 0 && g.inner % width == 0;
  const int64_t per_row = aligned ? g.inner / width : ceil_div(g.inner + width - 1, width);
  const int64_t slots = std::max<int64_t>(1, per_row), all = g.batch * slots;  // rows may be empty
  expect(g.channels <= INT32_MAX, "more channels than a grid has blocks");
  expect(g.inner <= kMost && g.batch < kMost && all < kMost, "more than 2^30 values in a row, or slots in a channel");
  Planar plan{g.channels, g.inner, slots, parts_of(g.channels, all / kThreads, width, reduces), kThreads};
  // Uses small blocks if they fill the card, so that each thread has enough work.
  const int64_t slots_of_thread = plan.parts * g.channels >= kFewBlocks ? kBatch : kBatch / 2;
  plan.threads = power_of_two(ceil_div(ceil_div(all, plan.parts), slots_of_thread), kWarp, kThreads);
  plan.sharing = share(all, plan.parts, plan.threads, reduces);
  plan.inverse = static_cast<uint32_t>(UINT32_MAX / slots);
  plan.slots_on = static_cast<int>(plan.sharing.step % slots);
  plan.rows_on = static_cast<int>(plan.sharing.step / slots);
  plan.row_step = g.channels * g.inner;
  plan.values_on = plan.rows_on * plan.row_step;
  plan.misaligned = misaligned;
  plan.cut_after = (misaligned + g.batch * g.channels * g.inner) % width != 0;
  return plan;
}

inline Interleaved split_interleaved(const Geometry& g, int64_t width, bool reduces) {
  Interleaved plan{g.channels, 1, 1, 1, 1};
  const int64_t slots = ceil_div(g.channels, width), height = g.rows();
  const int64_t bytes = reduces ? kReducedBytes : kLineBytes;
  plan.columns = power_of_two(slots, 1, width == 1 ? kWarp : bytes / kVectorBytes);
  plan.tiles = ceil_div(slots, plan.columns);
  // At least one thread per channel of a tile.
  plan.rows = power_of_two(plan.columns * height, 64, kThreads) / plan.columns;
  plan.parts = parts_of(plan.tiles, height / plan.rows, width, reduces);
  if (reduces) plan.parts = std::max<int64_t>(1, std::min(plan.parts, kReduceRowBlocks / plan.tiles));
  expect(ceil_div(height, plan.parts) < kMost, "more than 2^30 rows in a part of a channel");
  plan.sharing = share(height, plan.parts, plan.rows, reduces && height < kMost);
  plan.step = plan.sharing.step * plan.channels;
  return plan;
}

}  // namespace bagua_syncbn::cuda
