// Registers the CPU kernels with torch.

#include "../ops.h"
#include "kernels.h"

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  bagua_syncbn::register_ops<bagua_syncbn::cpu::Device>(m);
}
