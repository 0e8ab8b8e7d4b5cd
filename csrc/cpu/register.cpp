// Registers the ops for CPU.

#include "../ops.h"
#include "kernels.h"

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  using bagua_syncbn::cpu::Device;
  m.impl("batch_norm_stats", TORCH_BOX(&bagua_syncbn::batch_norm_stats<Device>));
  m.impl("batch_norm_gather_stats", TORCH_BOX(&bagua_syncbn::batch_norm_gather_stats<Device>));
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::batch_norm_elemt<Device>));
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&bagua_syncbn::batch_norm_backward_reduce<Device>));
  m.impl("batch_norm_backward_elemt", TORCH_BOX(&bagua_syncbn::batch_norm_backward_elemt<Device>));
}
