// batch_norm_elemt: act(z) of z = (x - mean) * invstd * weight + bias + residual.

#include "../checks.h"
#include "act.h"
#include "mask.h"

namespace bagua_syncbn::cpu {
namespace {

// `activation` may be null.
Tensor elemt(const Laid& laid, const Tensor& input, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& invstd,
             const Activation* activation) {
  const Geometry& g = laid.geometry;
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  dispatch_floating(scalar_type(input), "input", [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    const Normalization<A> normalization(weight, bias, mean, invstd, g.channels);
    const NormalizeFactors<A> factors = normalization.factors(streams(output, g));
    const Epilogue<T> epilogue = activation ? activation->epilogue<T>() : Epilogue<T>();
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    T* y = static_cast<T*>(output.mutable_data_ptr());
    const Loops<T>& loop = loops<T>();
    for_each_stretch(
        g, std::nullopt,
        [&](int64_t o, int64_t rows, int64_t n, int64_t channel, const uint8_t*) {
          loop.normalize_rows(x + o, y + o, rows, n, channel, g.channels, factors, epilogue.from(o));
        },
        [&](int64_t o, int64_t rows, const uint8_t*) {
          loop.normalize_columns(x + o, y + o, rows, g.channels, factors, epilogue.from(o));
        });
  });
  return with_strides_of(output, laid, input);
}

}  // namespace

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                        int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  const Laid laid = lay_out(input);
  if (activation == 0 && !residual) {
    return elemt(laid, input, weight, bias, mean, invstd, nullptr);
  }
  check_act(input, weight, bias, residual, activation);
  const Activation act{bias, laid_out_like(residual, laid), activation, parameter};
  return elemt(laid, input, weight, bias, mean, invstd, &act);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_elemt));
}
