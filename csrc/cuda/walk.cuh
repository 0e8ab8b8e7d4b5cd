// Iterates over the slots of a thread, W values each. docs/cuda_kernels.md has a picture.
#pragma once

#include "split.h"
#include "values.cuh"

namespace bagua_syncbn::cuda {

__device__ __forceinline__ int thread_index() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

// Index of this block in memory order. `reversed` counts from the end of the tensor, which the previous pass left in
// the cache.
__device__ __forceinline__ uint2 place_of(bool reversed) {
  if (!reversed) return {blockIdx.x, blockIdx.y};
  return {gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y};
}

// Planar: block (channel, part). Threads take the slots of the channel in turn, sample by sample.
template <int W>
class PlanarWalk {
 public:
  int64_t channel, part;

  __device__ PlanarWalk(const Planar& plan, bool reversed) : plan_(plan) {
    const uint2 place = place_of(reversed);
    channel = place.x;
    part = place.y;
    const auto begin = static_cast<unsigned>(plan.sharing.begin_of(part));
    const auto end = static_cast<unsigned>(plan.sharing.end_of(part));
    whole_ = !(plan.misaligned != 0 && place.x + place.y == 0) &&
             !(plan.cut_after && place.x == gridDim.x - 1 && end == plan.sharing.count);
    const unsigned first = begin + threadIdx.x;
    left_ = static_cast<int>(end - first);
    // `sample` is first / slots, or one less, because `first` is less than 2^31.
    const unsigned sample = __umulhi(first, plan.inverse), slot = first - sample * static_cast<unsigned>(plan.slots);
    const bool more = slot >= plan.slots;
    sample_ = static_cast<int>(sample + more);
    slot_ = static_cast<int>(slot - (more ? plan.slots : 0));
    offset_ = (sample_ * plan.channels + channel) * plan.inner;
  }

  // The number of threads along the block's channels, and this thread's index among them.
  __device__ __forceinline__ int columns() const { return 1; }
  __device__ __forceinline__ int column() const { return 0; }
  // The channel whose per-channel values this thread reads and writes, or -1.
  __device__ __forceinline__ int64_t own_channel() const { return thread_index() == 0 ? channel : -1; }

  __device__ __forceinline__ bool done() const { return left_ <= 0; }

  // The sample of the next slot.
  __device__ __forceinline__ int64_t place() const { return sample_; }

  // True if all slots of the part are inside the tensor, including their values from neighboring rows.
  __device__ __forceinline__ bool whole() const { return whole_; }

  // Returns the next slot, which is empty at the end. Has no branch, so all slots of a batch are found at once.
  __device__ __forceinline__ Slot<W, true> next() {
    // Offset of the row within its first slot.
    const int shift = W == 1 ? 0 : static_cast<int>((static_cast<unsigned>(offset_) + plan_.misaligned) % W);
    const int begin = slot_ * W - shift, rest = static_cast<int>(plan_.inner) - begin;
    const Slot<W, true> slot{offset_ + begin, begin < 0 ? shift : 0, done() ? 0 : min(rest, W)};
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
  int64_t offset_;  // start of the row
  int sample_, slot_;
  int left_;  // slots left in the part, including the next
};

// Interleaved: block (tile, part). A thread has the same W channels in every row.
template <int W>
class InterleavedWalk {
 public:
  int64_t channel, part;  // `channel`: the first channel of the thread

  __device__ InterleavedWalk(const Interleaved& plan, bool reversed) : plan_(plan) {
    const uint2 place = place_of(reversed);
    part = place.y;
    tile_ = place.x * plan.columns * W;
    channel = tile_ + threadIdx.x * W;
    const int64_t row = plan.sharing.begin_of(part);
    end_ = plan.sharing.end_of(part);
    // W divides the number of channels, so a thread has W channels or none.
    left_ = channel < plan.channels ? static_cast<int>(end_ - row) - int(threadIdx.y) : 0;
    offset_ = (row + threadIdx.y) * plan.channels + channel;
  }

  __device__ __forceinline__ int columns() const { return blockDim.x; }
  __device__ __forceinline__ int column() const { return threadIdx.x; }
  __device__ __forceinline__ int64_t own_channel() const {
    const int64_t own = tile_ + thread_index();
    return thread_index() < static_cast<int>(blockDim.x) * W && own < plan_.channels ? own : -1;
  }

  __device__ __forceinline__ bool done() const { return left_ <= 0; }

  // The row of the next slot.
  __device__ __forceinline__ int64_t place() const { return end_ - left_; }

  __device__ __forceinline__ bool whole() const { return true; }

  __device__ __forceinline__ Slot<W, false> next() {
    const Slot<W, false> slot{done() ? -1 : offset_, 0, W};
    left_ -= static_cast<int>(plan_.sharing.step);
    offset_ += plan_.step;
    return slot;
  }

 private:
  const Interleaved& plan_;
  int64_t tile_, offset_, end_;
  int left_;  // rows left in the part, including the next
};

}  // namespace bagua_syncbn::cuda
