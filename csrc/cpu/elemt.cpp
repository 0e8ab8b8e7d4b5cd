// batch_norm_elemt: act(z) of z = (x - mean) * invstd * weight + bias + residual; with a mask, 0 where a position does
// not count.

#include "../checks.h"
#include "act.h"
#include "mask.h"

namespace bagua_syncbn::cpu {
namespace {

// Planar, the rows [begin, end) of (batch, channels).
template <typename T, typename A = Accumulate<T>>
void normalize_masked(const T* x, T* y, const Mask& mask, const Geometry& g, const NormalizeFactors<A>& factors,
                      int64_t begin, int64_t end) {
  for_each_run(mask, g, begin, end,
               [&](Run::Kind kind, int64_t o, int64_t rows, int64_t n, int64_t channel, const uint8_t* valid) {
                 if (kind == Run::kNone) return (void)std::memset(y + o, 0, rows * n * sizeof(T));
                 loops<T>().normalize_rows(x + o, y + o, kind == Run::kAll ? nullptr : valid, rows, n, channel,
                                           g.channels, factors, {});
               });
}

// `activation` and `mask` may be null, and one of them is.
Tensor elemt(const Laid& laid, const Tensor& input, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& invstd, const Activation* activation,
             const Mask* mask) {
  const Geometry& g = laid.geometry;
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    const Normalization<A> normalization(weight, bias, mean, invstd, g.channels);
    const NormalizeFactors<A> factors = normalization.factors(streams(output, g));
    const Epilogue<T> epilogue = activation ? activation->epilogue<T>() : Epilogue<T>();
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    T* y = static_cast<T*>(output.mutable_data_ptr());
    const Loops<T>& loop = loops<T>();
    if (g.interleaved) {
      parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
        const int64_t o = begin * g.channels, rows = end - begin;
        Made made;
        const uint8_t* valid = mask ? positions_at(*mask, begin, rows, made) : nullptr;
        loop.normalize_columns(x + o, y + o, valid, rows, g.channels, factors, epilogue.from(o));
      });
    } else {
      parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
        if (mask) return normalize_masked(x, y, *mask, g, factors, begin, end);
        const int64_t o = begin * g.inner, rows = end - begin, channel = begin % g.channels;
        loop.normalize_rows(x + o, y + o, nullptr, rows, g.inner, channel, g.channels, factors, epilogue.from(o));
      });
    }
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
  return elemt(lay_out(values), values, std::nullopt, std::nullopt, zeros, ones, nullptr, &mask);
}

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& positions,
                        const std::optional<Tensor>& residual, int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  const std::optional<Mask> mask = mask_of(positions, input);
  const Laid laid = lay_out(input);
  if (activation == 0 && !residual) {
    return elemt(laid, input, weight, bias, mean, invstd, nullptr, mask ? &*mask : nullptr);
  }
  check_act(input, weight, bias, residual, activation);
  const Activation act = activation_of(residual, activation, parameter, laid);
  const Tensor output = elemt(laid, input, weight, bias, mean, invstd, &act, nullptr);
  return mask ? cleared(output, *mask) : output;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_elemt));
}
