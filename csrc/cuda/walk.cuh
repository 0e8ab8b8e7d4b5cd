// How a thread goes over the values of its part: in slots of W values, kBatch of them at a time, so that several loads
// are under way before the first is used.
#pragma once

#include "split.h"
#include "values.cuh"

namespace bagua_syncbn::cuda {

__device__ __forceinline__ int thread_index() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

// The index of this block in the order of memory; `reversed`, counted from the end, where the previous pass over the
// tensor has left values in the cache.
struct Place {
  unsigned x, y;

  __device__ __forceinline__ explicit Place(bool reversed)
      : x(reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x), y(reversed ? gridDim.y - 1 - blockIdx.y : blockIdx.y) {}
};

// Planar: block (channel, part). Threads take slots of the channel in turn, sample by sample. Of two parts of two
// threads, in turns, where a row has seven slots:
//
//     sample 0  | a0 a1 b0 b1 a0 a1 b0 |
//     sample 1  | b1 a0 a1 b0 b1 a0 a1 |
template <int W>
class PlanarWalk {
 public:
  int64_t channel, part;

  __device__ __forceinline__ int64_t first_channel() const { return channel; }  // of the block
  // Whether this thread reads the factors and writes the result of a channel: thread t of channel first_channel() + t.
  __device__ __forceinline__ bool writes() const { return thread_index() == 0; }
  __device__ PlanarWalk(const Planar& plan, bool reversed) : plan_(plan) {
    const Place place(reversed);
    channel = place.x;
    part = place.y;
    const auto begin = static_cast<unsigned>(plan.sharing.begin_of(part));
    const auto end = static_cast<unsigned>(plan.sharing.end_of(part));
    whole_ = !(plan.cut_before && place.x + place.y == 0) &&
             !(plan.cut_after && place.x == gridDim.x - 1 && end == plan.sharing.count);
    const unsigned first = begin + threadIdx.x;
    left_ = static_cast<int>(end - first);
    // At most one less than the quotient, since `first` is less than 2^31.
    const unsigned sample = __umulhi(first, plan.inverse), slot = first - sample * static_cast<unsigned>(plan.slots);
    const bool more = slot >= plan.slots;
    sample_ = static_cast<int>(sample + more);
    slot_ = static_cast<int>(slot - (more ? plan.slots : 0));
    offset_ = (sample_ * plan.channels + channel) * plan.inner;
  }

  __device__ __forceinline__ bool done() const { return left_ <= 0; }

  // The sample of the next slot.
  __device__ __forceinline__ int64_t place() const { return sample_; }

  // Whether every slot of the part lies in the tensor with all its values, those of neighbouring rows included.
  __device__ __forceinline__ bool whole() const { return whole_; }

  // The next slot; one without values when there are no more. Without a branch: all slots of a batch are found at once.
  __device__ __forceinline__ Slot<W> next() {
    // The row begins so far into its first slot.
    const int shift = W == 1 ? 0 : static_cast<int>((static_cast<unsigned>(offset_) + plan_.misaligned) % W);
    const int begin = slot_ * W - shift, rest = static_cast<int>(plan_.inner) - begin;
    const Slot<W> slot{offset_ + begin, begin < 0 ? shift : 0, done() ? 0 : min(rest, W)};
    slot_ += plan_.slots_on;
    const bool across = slot_ >= static_cast<int>(plan_.slots);
    slot_ -= across ? static_cast<int>(plan_.slots) : 0;
    sample_ += plan_.rows_on + across;
    offset_ += plan_.values_on + (across ? plan_.row_step : 0);
    left_ -= static_cast<int>(plan_.sharing.step);
    return slot;
  }

 private:
  const Planar& plan_;
  bool whole_;
  int64_t offset_;  // of the row
  int sample_, slot_;
  int left_;  // slots of the part from the next one on
};

// Interleaved: block (tile, part). A thread has the same W channels in every row.
//
//   part: rows r0 .. r1, tile of columns * W channels  columns = 2, rows = 2, W = 4
//     row r0         | t0 t0 t0 t0 t1 t1 t1 t1 |
//     row r0 + 1     | t2 t2 t2 t2 t3 t3 t3 t3 |
//     row r0 + 2     | t0 t0 t0 t0 t1 t1 t1 t1 |
template <int W>
class InterleavedWalk {
 public:
  int64_t tile_begin, part;
  int64_t channel;  // the first of the W of this thread
  bool active;      // whether the tensor has these channels: W divides their number

  __device__ InterleavedWalk(const Interleaved& plan, bool reversed) : plan_(plan) {
    const Place place(reversed);
    part = place.y;
    tile_begin = place.x * plan.columns * W;
    channel = tile_begin + threadIdx.x * W;
    active = channel < plan.channels;
    const int64_t row = plan.sharing.begin_of(part);
    end_ = plan.sharing.end_of(part);
    left_ = active ? static_cast<int>(end_ - row) - int(threadIdx.y) : 0;
    offset_ = (row + threadIdx.y) * plan.channels + channel;
  }

  __device__ __forceinline__ int64_t first_channel() const { return tile_begin; }  // of the block
  // Whether this thread reads the factors and writes the result of a channel: thread t of channel first_channel() + t.
  __device__ __forceinline__ bool writes() const {
    return thread_index() < static_cast<int>(blockDim.x) * W && tile_begin + thread_index() < plan_.channels;
  }
  __device__ __forceinline__ bool done() const { return left_ <= 0; }

  // The row of the next slot.
  __device__ __forceinline__ int64_t place() const { return end_ - left_; }

  __device__ __forceinline__ bool whole() const { return true; }

  // The next slot, or an empty one when there are no more.
  __device__ __forceinline__ RowSlot next() {
    const RowSlot slot{done() ? -1 : offset_};
    left_ -= static_cast<int>(plan_.sharing.step);
    offset_ += plan_.step;
    return slot;
  }

 private:
  const Interleaved& plan_;
  int64_t offset_, end_;
  int left_;  // rows of the part from the next one on
};

// Channels of an interleaved tile at most.
template <int W>
constexpr int kTileChannels = W == 1 ? kWarp : kLineBytes / kVectorBytes * W;

// Slots of a batch, each of W values: more if they are scalars, so that a batch is not too small.
template <int W>
constexpr int kSlots = W == 1 ? 2 * kBatch : kBatch;

// Two tensors at once, half as many values of each.
template <int W>
constexpr int kPairs = kSlots<W> / 2;

}  // namespace bagua_syncbn::cuda
