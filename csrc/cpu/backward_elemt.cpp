// batch_norm_backward_elemt: the gradient of the input, from the sums of all ranks. It goes through an activation
// first; with a mask, it passes through the statistics only where a position counts. batch_norm_backward_elemt_ puts it
// in the place of the gradient of the output.

#include <limits>

#include "../checks.h"
#include "../geometry.h"
#include "act.h"
#include "channels.h"
#include "mask.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

// Which positions count, and whether the gradient is 0 where they do not.
struct Outside {
  const Mask* mask = nullptr;
  bool zeroes = false;
};

// A cheap activation of what is normalized with this bias.
struct Before {
  const std::optional<Tensor>& bias;
  const Activation activation;
};

// Planar, the rows [begin, end) of (batch, channels).
template <typename T, typename A = Accumulate<T>>
void masked_gradient(const T* dy, const T* x, T* dx, const Outside& outside, const Geometry& g,
                     const GradientFactors<A>& factors, int64_t begin, int64_t end) {
  for_each_run(*outside.mask, g, begin, end,
               [&](Run::Kind kind, int64_t o, int64_t rows, int64_t n, int64_t channel, const uint8_t* valid) {
                 if (kind == Run::kNone && outside.zeroes) return (void)std::memset(dx + o, 0, rows * n * sizeof(T));
                 loops<T>().grad_rows(dy + o, x + o, dx + o, kind == Run::kAll ? nullptr : valid, outside.zeroes, rows,
                                      n, channel, g.channels, factors, {});
               });
}

Tensor backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                      const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count, int64_t ranks,
                      int64_t call, const std::optional<Tensor>& fault, bool in_place, const Outside& outside,
                      const Before* before = nullptr) {
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const Tensor grads = laid_out_like(grad_output, laid);
  Tensor grad_input = in_place ? grads : allocate_like(laid.tensor);
  const ChannelArray<double> totals(sums);
  bool same = true;
  for (int64_t w = 2 * g.channels; w < sums.numel(); w += 2) same &= same_word(totals[w], totals[w + 1], ranks);
  if (!same) record_fault<double>(record_of(fault), {Fault::kSum, call}, nullptr, 0, 0);
  if (input.numel() == 0) return with_strides_of(grad_input, laid, input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    const ChannelArray<A> means(mean), invstds(invstd), weights(weight, g.channels, A(1));
    std::vector<A> mean_dy(g.channels), projections(g.channels), scales(g.channels);
    const double number = static_cast<double>(*static_cast<const int64_t*>(count.const_data_ptr()));
    const double inverse = same ? 1.0 / number : std::numeric_limits<double>::quiet_NaN();
    for (int64_t c = 0; c < g.channels; ++c) {
      mean_dy[c] = static_cast<A>(totals[c] * inverse);
      projections[c] = static_cast<A>(totals[g.channels + c] * inverse * invstds[c] * invstds[c]);
      scales[c] = invstds[c] * weights[c];
    }

    const ChannelArray<A> shifts(before ? before->bias : std::nullopt, g.channels, A(0));
    const GradientFactors<A> factors{means.data(),  mean_dy.data(), projections.data(),
                                     scales.data(), shifts.data(),  streams(grad_input, g)};
    const T* dy = static_cast<const T*>(grads.const_data_ptr());
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    T* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    const Act<A> act = before ? before->activation.epilogue<T>().act : Act<A>{};
    const Loops<T>& loop = loops<T>();
    if (g.interleaved) {
      parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
        const int64_t o = begin * g.channels, rows = end - begin;
        Made made;
        const uint8_t* valid = outside.mask ? positions_at(*outside.mask, begin, rows, made) : nullptr;
        loop.grad_columns(dy + o, x + o, dx + o, valid, outside.zeroes, rows, g.channels, factors, act);
      });
    } else {
      parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
        if (outside.mask) return masked_gradient(dy, x, dx, outside, g, factors, begin, end);
        const int64_t o = begin * g.inner, rows = end - begin, channel = begin % g.channels;
        loop.grad_rows(dy + o, x + o, dx + o, nullptr, false, rows, g.inner, channel, g.channels, factors, act);
      });
    }
  });
  return with_strides_of(grad_input, laid, input);
}

}  // namespace

Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 int64_t ranks, const std::optional<Tensor>& fault, int64_t call,
                                 const std::optional<Tensor>& positions, bool zeroes, const std::optional<Tensor>& bias,
                                 int64_t activation, double parameter) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault);
  if (activation != 0) check_act(input, weight, bias, std::nullopt, activation);
  const std::optional<Mask> mask = mask_of(positions, input);
  const Outside outside{mask ? &*mask : nullptr, zeroes};
  if (is_cheap(activation) && !mask) {
    const Before before{bias, {std::nullopt, activation, parameter}};
    return backward_elemt(grad_output, input, weight, mean, invstd, sums, count, ranks, call, fault, false, outside,
                          &before);
  }
  const Tensor grad = activation == 0
                          ? grad_output
                          : gradient_through(grad_output, input, weight, bias, mean, invstd, activation, parameter);
  return backward_elemt(grad, input, weight, mean, invstd, sums, count, ranks, call, fault, false, outside);
}

void batch_norm_backward_elemt_(Tensor grad, const Tensor& input, const std::optional<Tensor>& weight,
                                const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                int64_t ranks, const std::optional<Tensor>& fault, int64_t call) {
  check_backward_elemt(grad, input, weight, mean, invstd, sums, count, fault);
  const Tensor result = backward_elemt(grad, input, weight, mean, invstd, sums, count, ranks, call, fault, true, {});
  if (result.const_data_ptr() != grad.const_data_ptr()) torch::stable::copy_(grad, result);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_backward_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_elemt));
  m.impl("batch_norm_backward_elemt_", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_elemt_));
}
