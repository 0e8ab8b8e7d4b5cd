// batch_norm_backward_reduce: sums of g = dy * act'(z) and of g * (x - mean) of each channel, and from them the
// gradients of weight and bias of this rank.

#include <tuple>

#include "../checks.h"
#include "act.h"

namespace bagua_syncbn::cpu {
namespace {

template <typename T>
void planar_sums(const Gradients<T>& of, const Geometry& g, double* sums) {
  const PlanarParts parts(g);
  std::vector<GradSums> results(g.channels * parts.count());
  parallel_over(results.size(), g.rows() / parts.count(), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t channel = unit / parts.count(), stride = g.channels * g.inner;
      parts.for_each_span(unit % parts.count(), [&](int64_t sample, int64_t offset, int64_t rows, int64_t values) {
        const int64_t start = channel * g.inner + sample * stride + offset;
        const GradSums span = loops<T>().grad_sums(of.from(start), rows, values, stride, channel);
        results[unit].dy += span.dy;
        results[unit].dy_xmu += span.dy_xmu;
      });
    }
  });
  for (int64_t c = 0; c < g.channels; ++c) {
    for (int64_t p = 0; p < parts.count(); ++p) {
      sums[c] += results[c * parts.count() + p].dy;
      sums[g.channels + c] += results[c * parts.count() + p].dy_xmu;
    }
  }
}

template <typename T>
void interleaved_sums(const Gradients<T>& of, const Geometry& g, double* sums) {
  const RowParts parts(g);
  const int64_t width = 2 * g.channels;
  std::vector<double> results(parts.count() * width);
  parallel_over(parts.count(), g.rows() * g.channels / parts.count(), [&](int64_t begin, int64_t end) {
    std::vector<Accumulate<T>> scratch(width);
    std::vector<double> tile(width);
    for (int64_t part = begin; part < end; ++part) {
      parts.for_each_tile(part, [&](int64_t row, int64_t rows) {
        loops<T>().grad_sums_columns(of.from(row * g.channels), rows, g.channels, scratch.data(), tile.data());
        for (int64_t c = 0; c < width; ++c) results[part * width + c] += tile[c];
      });
    }
  });
  for (int64_t part = 0; part < parts.count(); ++part) {
    for (int64_t c = 0; c < width; ++c) sums[c] += results[part * width + c];
  }
}

using Sums = std::tuple<Tensor, Tensor, Tensor>;

// `activation` may be null, and so may `grad`, which receives g.
Sums backward_reduce(const Tensor& grad_output, const Tensor& input, const Laid& laid, const Tensor& mean,
                     const Tensor& invstd, const std::optional<Tensor>& weight, const Words& words,
                     const Activation* activation, const Tensor* grad) {
  const Geometry& g = laid.geometry;
  const Tensor grads = laid_out_like(grad_output, laid);
  const int64_t width = 2 * g.channels;
  const ScalarType parameter_dtype = weight ? scalar_type(*weight) : accumulate_type(scalar_type(input));
  Tensor sums = allocate_vector(width + words.count, accumulate_type(scalar_type(input)), input);
  Tensor grad_weight = allocate_vector(g.channels, parameter_dtype, input);
  Tensor grad_bias = allocate_vector(g.channels, parameter_dtype, input);
  dispatch_floating(scalar_type(input), "input", [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    const ChannelArray<A> means(mean), invstds(invstd);
    std::vector<double> totals(width);
    Gradients<T> of{static_cast<const T*>(grads.const_data_ptr()),
                    static_cast<const T*>(laid.tensor.const_data_ptr()),
                    nullptr,
                    {means.data(), nullptr, nullptr, false},
                    {}};
    std::optional<Normalization<A>> normalization;
    if (activation) {
      normalization.emplace(weight, activation->bias, mean, invstd, g.channels);
      of.factors = normalization->factors(false);
      of.epilogue = activation->epilogue<T>();
      if (grad) of.g = static_cast<T*>(grad->mutable_data_ptr());
    }
    if (input.numel() > 0) (g.interleaved ? interleaved_sums<T> : planar_sums<T>)(of, g, totals.data());
    A* sums_out = static_cast<A*>(sums.mutable_data_ptr());
    for (int64_t c = 0; c < width; ++c) sums_out[c] = static_cast<A>(totals[c]);
    pack_words(sums_out + width, words);
    write_channels(grad_weight, [&](int64_t c) { return invstds[c] * static_cast<A>(totals[g.channels + c]); });
    write_channels(grad_bias, [&](int64_t c) { return totals[c]; });
  });
  return {sums, grad_weight, grad_bias};
}

}  // namespace

Tensor gradient_through(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                        const Tensor& mean, const Tensor& invstd, const Activation& activation) {
  const Laid laid = lay_out(input);
  const Tensor grad = allocate_like(laid.tensor);
  backward_reduce(grad_output, input, laid, mean, invstd, weight, {}, &activation, &grad);
  return with_strides_of(grad, laid, input);
}

Sums batch_norm_backward_reduce(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                const Tensor& invstd, const std::optional<Tensor>& weight,
                                std::optional<int64_t> fingerprint, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& residual, int64_t activation, double parameter,
                                std::optional<Tensor> grad) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  if (grad) check_like_input(*grad, "grad", input);
  const Words words = words_of_sums(fingerprint);
  const Laid laid = lay_out(input);
  const auto reduce = [&](const Activation* act, const Tensor* made) {
    return backward_reduce(grad_output, input, laid, mean, invstd, weight, words, act, made);
  };
  if (activation == 0 && !grad) return reduce(nullptr, nullptr);
  check_act(input, weight, bias, residual, activation);
  const Activation act{bias, laid_out_like(residual, laid), activation, parameter};
  if (is_cheap(activation) && !grad) return reduce(&act, nullptr);
  const Tensor made = grad ? laid_out_like(*grad, laid) : allocate_like(laid.tensor);
  const Sums sums = reduce(&act, &made);
  if (grad && made.const_data_ptr() != grad->const_data_ptr()) torch::stable::copy_(*grad, made);
  return sums;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_reduce));
}
