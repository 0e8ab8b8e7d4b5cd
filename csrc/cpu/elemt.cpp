// batch_norm_elemt: y = (x - mean) * invstd * weight + bias; batch_norm_masked_elemt: 0 where a position does not
// count; batch_norm_act_elemt: the activation of y, and of a residual added to it.

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
                 if (kind == Run::kNone) {
                   std::memset(y + o, 0, rows * n * sizeof(T));
                 } else if (kind == Run::kAll) {
                   loops<T>().normalize_rows(x + o, y + o, rows, n, channel, g.channels, factors);
                 } else {
                   loops<T>().masked_normalize_rows(x + o, y + o, valid, rows, n, channel, g.channels, factors);
                 }
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
    const Act<A> act = activation ? activation->act<A>() : Act<A>{};
    const T* r = activation ? activation->residual_data<T>() : nullptr;
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    T* y = static_cast<T*>(output.mutable_data_ptr());
    const Loops<T>& loop = loops<T>();
    if (g.interleaved) {
      parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
        const int64_t o = begin * g.channels, rows = end - begin;
        Made made;
        const uint8_t* valid = mask ? positions_at(*mask, begin, rows, made) : nullptr;
        if (!activation) return loop.normalize_columns(x + o, y + o, valid, rows, g.channels, factors);
        loop.act_columns(x + o, r ? r + o : r, y + o, rows, g.channels, factors, act);
      });
    } else {
      parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
        if (mask) return normalize_masked(x, y, *mask, g, factors, begin, end);
        const int64_t o = begin * g.inner, rows = end - begin, channel = begin % g.channels;
        if (!activation) return loop.normalize_rows(x + o, y + o, rows, g.inner, channel, g.channels, factors);
        loop.act_rows(x + o, r ? r + o : r, y + o, rows, g.inner, channel, g.channels, factors, act);
      });
    }
  });
  return with_strides_of(output, laid, input);
}

}  // namespace

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd) {
  check_elemt(input, weight, bias, mean, invstd);
  return elemt(lay_out(input), input, weight, bias, mean, invstd, nullptr, nullptr);
}

Tensor batch_norm_masked_elemt(const Tensor& input, const std::optional<Tensor>& weight,
                               const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& invstd,
                               const Tensor& positions) {
  check_elemt(input, weight, bias, mean, invstd);
  const Mask mask = mask_of(positions, input);
  return elemt(lay_out(input), input, weight, bias, mean, invstd, nullptr, &mask);
}

Tensor batch_norm_act_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                            const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                            int64_t activation, double parameter) {
  check_elemt(input, weight, bias, mean, invstd);
  check_act(input, weight, bias, residual, activation);
  const Laid laid = lay_out(input);
  const Activation act = activation_of(residual, activation, parameter, laid);
  return elemt(laid, input, weight, bias, mean, invstd, &act, nullptr);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_elemt));
  m.impl("batch_norm_masked_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_masked_elemt));
  m.impl("batch_norm_act_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_act_elemt));
}
