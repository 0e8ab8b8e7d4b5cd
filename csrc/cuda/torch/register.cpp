// Registers the CUDA kernels with torch.

#include "../../ops.h"
#include "context.h"

namespace bagua_syncbn::cuda {
namespace {

// Runs `kernel`, or on unsupported devices the op `fallback`, which has the same schema, uses plain torch and warns
// (bagua_syncbn/cuda/fallback.py). The first argument of every op is a tensor.
void run_or_fall_back(void (*kernel)(StableIValue*, uint64_t, uint64_t), const char* fallback, StableIValue* stack,
                      uint64_t arguments, uint64_t results) {
  int32_t device = 0;
  const auto input = torch::stable::detail::to<AtenTensorHandle>(stack[0]);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(input, &device));
  if (support_of(device) == Support::kRuns) return kernel(stack, arguments, results);
  // The fallback's error does not cross the stable ABI: bagua_syncbn/cuda/fallback.py stores and raises it.
  check(torch_call_dispatcher(fallback, "", stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS, fallback, "success",
        "an error");
}

}  // namespace
}  // namespace bagua_syncbn::cuda

#define BAGUA_SYNCBN_REGISTER(name)                                                                   \
  m.impl(#name, [](StableIValue* stack, uint64_t arguments, uint64_t results) {                       \
    bagua_syncbn::cuda::run_or_fall_back(TORCH_BOX(&bagua_syncbn::name<bagua_syncbn::cuda::Context>), \
                                         "bagua_syncbn_fallback::" #name, stack, arguments, results); \
  })

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
