// Replaces csrc/cuda/torch/context.cpp in tests: a CPU has no streams and devices.

#include "../../../csrc/cuda/torch/context.h"

#include <malloc.h>

namespace {

// Fills new memory with 0xfe bytes, a large number in any type, so that reads of uninitialized memory show.
[[maybe_unused]] const int perturbed = mallopt(M_PERTURB, 1);

bagua_syncbn::cuda::Support support = bagua_syncbn::cuda::Support::kRuns;

}  // namespace

extern "C" void emulate_support(int32_t value) {
  support = static_cast<bagua_syncbn::cuda::Support>(value);
}

namespace bagua_syncbn::cuda {

Support support_of(int32_t) {
  return support;
}

Context::Context(const Tensor& input) : input_(input) {}

}  // namespace bagua_syncbn::cuda
