// batch_norm_backward_elemt: the gradient of the input, from the sums of all ranks. It goes through an activation
// first; or, with a mask, it passes through the statistics only where a position counts.

#include <limits>

#include "../checks.h"
#include "act.h"
#include "mask.h"

namespace bagua_syncbn::cpu {
namespace {

// Writes to `grad_input`, laid out as the input, which may be `grads`. `activation`, which is cheap, may be null.
void backward_elemt(const Tensor& grads, const Laid& laid, const std::optional<Tensor>& weight, const Tensor& mean,
                    const Tensor& invstd, const Tensor& sums, const Tensor& count, int64_t ranks, int64_t call,
                    const std::optional<Tensor>& fault, const std::optional<Mask>& mask, const Activation* activation,
                    Tensor grad_input) {
  const Geometry& g = laid.geometry;
  const ChannelArray<double> totals(sums);
  bool same = true;
  for (int64_t w = 2 * g.channels; w < sums.numel(); w += 2) same &= same_word(totals[w], totals[w + 1], ranks);
  if (!same) record_fault<double>(record_of(fault), {Fault::kSum, call}, nullptr, 0, 0);
  if (laid.tensor.numel() == 0) return;
  dispatch_floating(scalar_type(laid.tensor), "input", [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    const ChannelArray<A> invstds(invstd);
    std::vector<A> mean_dy(g.channels), projections(g.channels);
    const double number = static_cast<double>(*static_cast<const int64_t*>(count.const_data_ptr()));
    const double inverse = same ? 1.0 / number : std::numeric_limits<double>::quiet_NaN();
    for (int64_t c = 0; c < g.channels; ++c) {
      mean_dy[c] = static_cast<A>(totals[c] * inverse);
      projections[c] = static_cast<A>(totals[g.channels + c] * inverse * invstds[c] * invstds[c]);
    }

    const Normalization<A> normalization(weight, activation ? activation->bias : std::nullopt, mean, invstd,
                                         g.channels);
    const GradientFactors<A> factors{normalization.factors(streams(grad_input, g)), mean_dy.data(), projections.data()};
    const T* dy = static_cast<const T*>(grads.const_data_ptr());
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    T* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    const Act<A> act = activation ? activation->epilogue<T>().act : Act<A>{};
    const Loops<T>& loop = loops<T>();
    for_each_stretch(
        g, mask,
        [&](int64_t o, int64_t rows, int64_t n, int64_t channel, const uint8_t* valid) {
          loop.grad_rows(dy + o, x + o, dx + o, valid, rows, n, channel, g.channels, factors, act);
        },
        [&](int64_t o, int64_t rows, const uint8_t* valid) {
          loop.grad_columns(dy + o, x + o, dx + o, valid, rows, g.channels, factors, act);
        });
  });
}

}  // namespace

Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 int64_t ranks, const std::optional<Tensor>& fault, int64_t call,
                                 const std::optional<Tensor>& positions, const std::optional<Tensor>& bias,
                                 int64_t activation, double parameter, std::optional<Tensor> into) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault, into);
  if (activation != 0) check_act(input, weight, bias, std::nullopt, activation);
  const std::optional<Mask> mask = mask_without_act(positions, input, activation);
  const Laid laid = lay_out(input);
  const Tensor grad_input = into ? laid_out_like(*into, laid) : allocate_like(laid.tensor);
  const Activation act{bias, std::nullopt, activation, parameter};
  const auto make = [&](const Tensor& dy, const Activation* before) {
    backward_elemt(laid_out_like(dy, laid), laid, weight, mean, invstd, sums, count, ranks, call, fault, mask, before,
                   grad_input);
  };
  if (activation == 0 || is_cheap(activation)) {
    make(grad_output, activation == 0 ? nullptr : &act);
  } else {
    make(gradient_through(grad_output, input, weight, mean, invstd, act), nullptr);
  }
  if (!into) return with_strides_of(grad_input, laid, input);
  if (grad_input.get() != into->get()) torch::stable::copy_(*into, grad_input);
  return allocate_vector(0, scalar_type(input), input);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_backward_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_elemt));
}
