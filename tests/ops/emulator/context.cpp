// Replaces csrc/cuda/torch/context.cpp in tests: a CPU has no streams.

#include "../../../csrc/cuda/torch/context.h"

#include <malloc.h>

namespace {

// Fills new memory with 0xfe bytes, a large number in any type, so that reads of uninitialized memory show.
[[maybe_unused]] const int perturbed = mallopt(M_PERTURB, 1);

}  // namespace

bagua_syncbn::cuda::Context::Context(const Tensor& input) : input_(input) {}
