// How the values of one channel lie in memory, and which of them count.
#pragma once

#include <cstdint>

namespace bagua_syncbn {

// One of two ways; everything else is made one of them first.
// Planar, (batch, channels, inner): the `inner` values of one sample and channel are contiguous.
// Interleaved, (batch * inner, channels): the channels of one place are contiguous; channels_last and (N, C) are this.
struct Geometry {
  bool interleaved;
  int64_t batch;
  int64_t channels;
  int64_t inner;

  int64_t rows() const { return batch * inner; }  // values per channel
};

// Which positions of an input count, the same for all channels: a byte for each position, or a length for each sample.
struct Mask {
  const uint8_t* positions;  // (batch, inner), 1 or 0; or null
  const int64_t* lengths;    // (batch): how many places count, from the first one on, in each line of a sample
  int64_t inner;             // positions of a sample
  int64_t length;            // of a line, along the last dimension
};

}  // namespace bagua_syncbn
