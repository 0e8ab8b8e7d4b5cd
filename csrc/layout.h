// Memory layouts of tensors, and masks.
#pragma once

#include <cstdint>

namespace bagua_syncbn {

// Tensors with another layout are copied first.
// Planar, (batch, channels, inner): the `inner` values of a sample and channel are contiguous.
// Interleaved, (batch * inner, channels): the channels of a position are contiguous, as in channels_last and (N, C).
struct Geometry {
  bool interleaved;
  int64_t batch;
  int64_t channels;
  int64_t inner;

  int64_t rows() const { return batch * inner; }  // values per channel
};

// The valid positions of an input, the same for all channels: a byte for each position, or a length for each sample.
struct Mask {
  const uint8_t* positions;  // (batch, inner), 1 or 0; or null
  const int64_t* lengths;    // (batch): number of valid positions at the start of each line of a sample
  int64_t inner;             // positions per sample
  int64_t length;            // positions per line, along the last dimension
};

}  // namespace bagua_syncbn
