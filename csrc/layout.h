// How the values of one channel lie in memory. There are two ways, and everything else is made one of them first.
#pragma once

#include <cstdint>

namespace bagua_syncbn {

// Planar, (batch, channels, inner): the `inner` values of one sample and channel are contiguous.
// Interleaved, (batch * inner, channels): the channels of one place are contiguous; channels_last and (N, C) are this.
struct Geometry {
  bool interleaved;
  int64_t batch;
  int64_t channels;
  int64_t inner;

  int64_t rows() const { return batch * inner; }  // values per channel
};

}  // namespace bagua_syncbn
