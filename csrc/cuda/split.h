// How the values of a tensor are shared out over blocks and threads. All of it depends on sizes and alignment alone,
// not on the card or on what else runs there, so that the result does not either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numeric>

#include "../host_device.h"
#include "../layout.h"

namespace bagua_syncbn::cuda {

// Threads of a block at most, and of a warp.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Bytes of the widest load there is on all cards.
constexpr int kVectorBytes = 16;
// Values of a vector at most: a thread notes in 32 bits which of those of a batch count.
constexpr int64_t kMostValues = 8;
// So much of a row an interleaved block takes: of a cache line. A reduction takes half, which memory can still give by
// itself: the more threads of a block have a channel in common, the fewer rounds does merging its parts take.
constexpr int kLineBytes = 128;
constexpr int kReducedBytes = 64;

// Blocks to aim at: element-wise several rounds on the largest cards; a reduction as many as run there at a time, four
// on a multiprocessor, since its beginning and its end cost as much as a batch or two, and someone has to add up what
// blocks leave.
constexpr int64_t kReduceBlocks = 528;
constexpr int64_t kElementBlocks = 4096;
// Interleaved, where blocks leave more to add up: three for each multiprocessor of the largest cards, as many as run.
constexpr int64_t kReduceRowBlocks = 396;
// Below so many blocks, two for each multiprocessor of the largest cards, a part is as small as one batch a thread.
constexpr int64_t kFewBlocks = 264;
// Loads that a thread has under way before it uses the first: by number of values at once.
constexpr int kBatch = 4;
// Less than this many slots for each thread of a part, two batches at most, are not worth a block, where there are
// blocks enough.
constexpr int64_t kFewestSlots = kBatch + kBatch / 2;
// Partial results that a thread of the last block to arrive has under way, where there are many.
constexpr int kMergeAhead = 8;
// Values of a planar row, slots of a planar channel, and rows of an interleaved part at most.
constexpr int64_t kMost = int64_t(1) << 30;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// So many values of this size are a vector.
constexpr int64_t vector_width(int64_t value_size) {
  return std::min(kVectorBytes / value_size, kMostValues);
}

// The smallest power of two from `value` on, in [low, high], which are powers of two.
inline int64_t power_of_two(int64_t value, int64_t low, int64_t high) {
  int64_t power = low;
  while (power < value && power < high) power *= 2;
  return power;
}

// How `count` things, slots or rows, are shared out over `parts` blocks of `threads`.
//
// In ranges of nearly the same length for passes of more blocks than run at a time. In turns for those that all run
// together: each part takes as many as it has threads, then the next part, and so on round and round. So a reduction
// goes over all of the tensor in the order of memory, and the cache keeps its end, where the next pass begins; of parts
// that are ranges it would keep the end of each. Divided by the host: a division takes a thread longer than all else it
// does before its first load.
struct Sharing {
  int64_t count;
  int64_t length;  // of a range, or of a turn
  int64_t longer;  // so many ranges, the first ones, are longer by one
  int64_t step;    // from one of a thread to its next
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

// Blocks run in about the order of x, then y, then z, which is that of memory.
struct Grid {
  int64_t x, y, z;
};

// Planar. The values of a channel lie in slots of the kernel's width, which are aligned: `slots` for the row of each
// sample, of which the first and the last may be cut short by its ends. A block has some of all slots of a channel.
struct Planar {
  int64_t batch;
  int64_t channels;
  int64_t inner;
  int64_t slots;
  int64_t number;   // of parts
  int64_t threads;  // of a block
  Sharing sharing{1, 1, 1, false};
  uint32_t inverse = 0;                        // 2^32 / slots, to divide by
  int slots_on = 0, rows_on = 0;               // from a slot of a thread to its next
  int64_t values_on = 0;                       // those rows
  int64_t row_step = 0;                        // from a row of a channel to its next
  int misaligned = 0;                          // by so many values the tensor begins after an aligned slot
  bool cut_before = false, cut_after = false;  // whether its first slot begins before it, its last ends after it

  BAGUA_SYNCBN_HOST_DEVICE int64_t parts() const { return number; }
  BAGUA_SYNCBN_HOST_DEVICE int64_t values_of_channel() const { return batch * inner; }
  BAGUA_SYNCBN_HOST_DEVICE int64_t channel_stride() const { return inner; }
  Grid grid() const { return {channels, number, 1}; }
  Grid block() const { return {threads, 1, 1}; }
};

// Interleaved. A block has a tile of channels and some of the rows.
struct Interleaved {
  int64_t height;  // rows of the tensor
  int64_t channels;
  int64_t tiles;
  int64_t row_parts;
  int64_t columns;  // threads along a row
  int64_t rows;     // threads across rows
  Sharing sharing{1, 1, 1, false};
  int64_t step = 0;  // from a slot of a thread to its next

  BAGUA_SYNCBN_HOST_DEVICE int64_t parts() const { return row_parts; }
  BAGUA_SYNCBN_HOST_DEVICE int64_t values_of_channel() const { return height; }
  BAGUA_SYNCBN_HOST_DEVICE int64_t channel_stride() const { return 1; }
  Grid grid() const { return {tiles, row_parts, 1}; }
  Grid block() const { return {columns, rows, 1}; }
};

enum class Pass { kReduction, kElementwise };

constexpr int64_t most_blocks(Pass pass) {
  return pass == Pass::kReduction ? kReduceBlocks : kElementBlocks;
}

// Into how many parts to split each of `units` channels or tiles, of which a thread would have `slots` slots in a
// block.
inline int64_t parts_of(int64_t units, int64_t slots, int64_t width, Pass pass) {
  const int64_t least = width == 1 ? kBatch : kBatch / 2;  // a batch of two tensors
  const int64_t several = slots / kFewestSlots;
  const int64_t fill = std::min(slots / least, ceil_div(kFewBlocks, units));
  return std::max<int64_t>(1, std::min(most_blocks(pass) / units, std::max(several, fill)));
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

inline Planar split_planar(const Geometry& g, int64_t width, int misaligned, Pass pass) {
  const bool aligned = misaligned == 0 && g.inner % width == 0;
  const int64_t slots = aligned ? g.inner / width : ceil_div(g.inner + width - 1, width), all = g.batch * slots;
  Planar plan{g.batch, g.channels, g.inner, slots, parts_of(g.channels, all / kThreads, width, pass), kThreads};
  // Where blocks fill the card, small ones, so that a thread has something to do beside beginning and ending.
  const int64_t slots_of_thread = plan.parts() * g.channels >= kFewBlocks ? kBatch : kBatch / 2;
  plan.threads = power_of_two(ceil_div(ceil_div(all, plan.parts()), slots_of_thread), kWarp, kThreads);
  plan.sharing = {all, plan.parts(), plan.threads, pass == Pass::kReduction};
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

// Whether a thread can count in 32 bits, which it can for all that fits the memory of a card.
inline bool fits(const Planar& plan) {
  return plan.inner <= kMost && plan.batch < kMost && plan.batch * plan.slots < kMost;
}

inline bool fits(const Interleaved& plan) {
  return ceil_div(plan.height, plan.row_parts) < kMost;
}

// Parts of a tile from which on merging them costs more than it saves: of `batches` batches a thread in all, each part
// takes as many rounds as it has batches, and the last block as many as each of its `groups` of threads has times
// kMergeAhead parts, at half the time. The sum is least here.
inline int64_t parts_worth_merging(int64_t batches, int64_t groups) {
  return std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(static_cast<double>(2 * kMergeAhead * groups * batches))));
}

inline Interleaved split_interleaved(const Geometry& g, int64_t width, Pass pass) {
  Interleaved plan{g.rows(), g.channels, 1, 1, 1, 1};
  const int64_t slots = ceil_div(g.channels, width);
  const int64_t bytes = pass == Pass::kReduction ? kReducedBytes : kLineBytes;
  plan.columns = power_of_two(slots, 1, width == 1 ? kWarp : bytes / kVectorBytes);
  plan.tiles = ceil_div(slots, plan.columns);
  const int64_t threads = power_of_two(plan.columns * plan.height, 64, kThreads);  // one for each channel of a tile
  plan.rows = threads / plan.columns;
  const int64_t slots_of_thread = plan.height / plan.rows;
  plan.row_parts = parts_of(plan.tiles, slots_of_thread, width, pass);
  if (pass == Pass::kReduction) {
    const int64_t worth = parts_worth_merging(slots_of_thread / kBatch, threads / (plan.columns * width));
    plan.row_parts = std::min({plan.row_parts, worth, std::max<int64_t>(1, kReduceRowBlocks / plan.tiles)});
  }
  plan.sharing = {plan.height, plan.row_parts, plan.rows, pass == Pass::kReduction && plan.height < kMost};
  plan.step = plan.sharing.step * plan.channels;
  return plan;
}

}  // namespace bagua_syncbn::cuda
