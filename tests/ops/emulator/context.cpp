// csrc/cuda/torch/context.cpp for tests: device and stream are what a test says they are, and no guard is needed on a
// CPU.

#include "../../../csrc/cuda/torch/context.h"

#include <malloc.h>

#include <cstdlib>
#include <utility>

namespace {

// Memory that nobody has written to holds 0xfe in all bytes, a large number of any type: what is read from there shows.
[[maybe_unused]] const int perturbed = mallopt(M_PERTURB, 1);

bagua_syncbn::cuda::Stream stream = nullptr;
bagua_syncbn::cuda::StreamState stream_state{};
bagua_syncbn::cuda::Support support = bagua_syncbn::cuda::Support::kRuns;
int made_tickets = 0;

}  // namespace

extern "C" void emulate_stream(uint64_t handle, uint64_t id, bool capturing) {
  stream = reinterpret_cast<bagua_syncbn::cuda::Stream>(handle);
  stream_state = {capturing, id};
}

extern "C" int count_made_tickets() {
  return std::exchange(made_tickets, 0);
}

extern "C" void emulate_support(int32_t value) {
  support = static_cast<bagua_syncbn::cuda::Support>(value);
}

namespace bagua_syncbn::cuda {

uint32_t* make_tickets(Stream) {
  ++made_tickets;
  return static_cast<uint32_t*>(std::calloc(kTickets, sizeof(uint32_t)));
}

Support support_of(int32_t) {
  return support;
}

Context::Context(const Tensor& input) : input_(input) {
  stream = ::stream;
}

StreamState Context::state() const {
  return stream_state;
}

}  // namespace bagua_syncbn::cuda
