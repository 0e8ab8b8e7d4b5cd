// Memory of split reductions, from torch's allocator.
#pragma once

#include <optional>

#include "context.h"

namespace bagua_syncbn::cuda {

// Its memory is freed on the host while the kernel may still be running; the allocator gives it out again for later
// work on the same stream only.
class TorchWorkspace final : public Workspace {
 public:
  TorchWorkspace(const Tensor& like, const Context& context) : like_(like), context_(context) {}

  double* partials(int64_t count) override;
  uint32_t* tickets() override;

 private:
  const Tensor& like_;
  const Context& context_;
  std::optional<Tensor> partials_, tickets_;
};

}  // namespace bagua_syncbn::cuda
