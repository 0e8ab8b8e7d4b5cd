// Layout of what one rank sends in the forward pass: [mean (C) | var (C) | low | high], count = low + high * 2^24.
// Two words because a float32 holds every integer only up to 2^24.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace bagua_syncbn {

constexpr int64_t kCountBase = int64_t(1) << 24;

BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t packed_size(int64_t channels) {
  return 2 * channels + 2;
}

BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t packed_channels(int64_t size) {
  return size / 2 - 1;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void pack_count(A* packed, int64_t channels, int64_t count) {
  packed[2 * channels] = static_cast<A>(count % kCountBase);
  packed[2 * channels + 1] = static_cast<A>(count / kCountBase);
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE int64_t unpack_count(const A* packed, int64_t channels) {
  return static_cast<int64_t>(packed[2 * channels]) + static_cast<int64_t>(packed[2 * channels + 1]) * kCountBase;
}

}  // namespace bagua_syncbn
