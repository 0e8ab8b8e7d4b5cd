// Registers the CUDA kernels with torch.

#include "../../ops.h"
#include "context.h"

#define BAGUA_SYNCBN_REGISTER(name) m.impl(#name, TORCH_BOX(&bagua_syncbn::name<bagua_syncbn::cuda::Context>))

#if defined(BAGUA_SYNCBN_EMULATOR)  // tests run the ops on CPU tensors
STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn_emulated, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CUDA, m) {
#endif
  BAGUA_SYNCBN_REGISTER(batch_norm_stats);
  BAGUA_SYNCBN_REGISTER(batch_norm_gather_stats);
  BAGUA_SYNCBN_REGISTER(batch_norm_elemt);
  BAGUA_SYNCBN_REGISTER(batch_norm_backward_reduce);
  BAGUA_SYNCBN_REGISTER(batch_norm_backward_elemt);
}
