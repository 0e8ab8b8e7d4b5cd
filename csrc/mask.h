// Which positions of an input count, the same for all channels: a byte for each says it, or lengths do.
#pragma once

#include <cstdint>

namespace bagua_syncbn {

struct Mask {
  const uint8_t* positions;  // (batch, inner), 1 or 0; or null
  const int64_t* lengths;    // (batch): of each line so many places count, from the first one on
  int64_t inner;             // positions of a sample
  int64_t length;            // of a line, along the last dimension
};

}  // namespace bagua_syncbn
