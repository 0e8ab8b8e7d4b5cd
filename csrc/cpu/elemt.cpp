// batch_norm_elemt: act(z) of z = (x - mean) * invstd * weight + bias + residual.

#include "../checks.h"
#include "normalization.h"
#include "work.h"

namespace bagua_syncbn::cpu {

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                        int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  if (activation != 0 || residual) check_act(input, weight, bias, residual, activation);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const std::optional<Tensor> laid_residual = laid_out_like(residual, laid);
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  dispatch_floating(scalar_type(input), "input", [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    const Normalization<Accumulate<T>> normalization(weight, bias, mean, invstd, g.channels, parameter);
    const auto factors = normalization.factors(streams(output, g));
    const T *x = data_of<T>(laid.tensor), *added = data_of<T>(laid_residual);
    T* y = static_cast<T*>(output.mutable_data_ptr());
    const auto normalize = loops<T>().activated[activation].normalize[g.interleaved];
    for_each_stretch(g, nullptr, [&](int64_t o, Rows rows, const uint8_t*) {
      normalize(x + o, added ? added + o : nullptr, y + o, rows, factors);
    });
  });
  return with_strides_of(output, laid, input);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_elemt));
}
