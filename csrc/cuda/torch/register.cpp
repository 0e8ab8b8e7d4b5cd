// Registers the CUDA kernels with torch.

#include "../../ops.h"
#include "context.h"

#if defined(BAGUA_SYNCBN_EMULATOR)  // tests run the ops on CPU tensors
STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn_emulated, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CUDA, m) {
#endif
  bagua_syncbn::register_ops<bagua_syncbn::cuda::Context>(m);
}
