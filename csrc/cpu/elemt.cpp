// batch_norm_elemt: act(z) of z = (x - mean) * invstd * weight + bias + residual; with a mask, 0 where a position does
// not count.

#include "../checks.h"
#include "act.h"
#include "mask.h"

namespace bagua_syncbn::cpu {
namespace {

// `activation` may be null, and is where there is a mask.
Tensor elemt(const Laid& laid, const Tensor& input, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& invstd, const Activation* activation,
             const std::optional<Mask>& mask) {
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
        g, mask,
        [&](int64_t o, int64_t rows, int64_t n, int64_t channel, const uint8_t* valid, bool none) {
          if (none) return (void)std::memset(y + o, 0, rows * n * sizeof(T));
          loop.normalize_rows(x + o, y + o, valid, rows, n, channel, g.channels, factors, epilogue.from(o));
        },
        [&](int64_t o, int64_t rows, const uint8_t* valid) {
          loop.normalize_columns(x + o, y + o, valid, rows, g.channels, factors, epilogue.from(o));
        });
  });
  return with_strides_of(output, laid, input);
}

}  // namespace

Tensor cleared(const Tensor& values, const Mask& mask) {
  const int64_t channels = values.size(1);
  const ScalarType dtype = accumulate_type(scalar_type(values));
  const Tensor zeros = torch::stable::new_zeros(values, {&channels, 1}, dtype);
  Tensor ones = allocate_vector(channels, dtype, values);
  write_channels(ones, [](int64_t) { return 1; });
  return elemt(lay_out(values), values, std::nullopt, std::nullopt, zeros, ones, nullptr, mask);
}

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& positions,
                        const std::optional<Tensor>& residual, int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  const std::optional<Mask> mask = mask_of(positions, input);
  const Laid laid = lay_out(input);
  if (activation == 0 && !residual) {
    return elemt(laid, input, weight, bias, mean, invstd, nullptr, mask);
  }
  check_act(input, weight, bias, residual, activation);
  const Activation act{bias, laid_out_like(residual, laid), activation, parameter};
  const Tensor output = elemt(laid, input, weight, bias, mean, invstd, &act, std::nullopt);
  return mask ? cleared(output, *mask) : output;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_elemt));
}
