// The ops on plain CPU memory.
#pragma once

#include "../arguments.h"
#include "../stable_abi.h"

namespace bagua_syncbn::cpu {

// Unused; CUDA's Device has a stream.
struct Device {
  explicit Device(const Tensor&) {}
};

BAGUA_SYNCBN_DECLARE_OPS

}  // namespace bagua_syncbn::cpu
