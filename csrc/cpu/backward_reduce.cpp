// batch_norm_backward_reduce: sums of g = dy * act'(z) and of g * (x - mean) of each channel, and from them the
// gradients of weight and bias of this rank; with a mask, of the positions that count.

#include <memory>
#include <tuple>

#include "../checks.h"
#include "act.h"
#include "mask.h"

namespace bagua_syncbn::cpu {
namespace {

// The way through an activation: gradients = dy * act'(z), which may be null, and their sums.
template <typename T, typename A = Accumulate<T>>
class Through {
 public:
  Through(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& mean,
          const Tensor& invstd, const Geometry& g, const Activation& activation, T* gradients)
      : normalization_(weight, bias, mean, invstd, g.channels),
        factors_(normalization_.factors(false)),
        act_(activation.act<A>()),
        residual_(activation.residual_data<T>()),
        gradients_(gradients) {}

  GradSums rows(const T* dy, const T* x, int64_t start, int64_t rows, int64_t n, int64_t stride,
                int64_t channel) const {
    return loops<T>().act_grad_sums(dy + start, x + start, from(residual_, start), from(gradients_, start), rows, n,
                                    stride, channel, factors_, act_);
  }

  void columns(const T* dy, const T* x, int64_t start, int64_t rows, int64_t channels, A* scratch, double* out) const {
    loops<T>().act_grad_sums_columns(dy + start, x + start, from(residual_, start), from(gradients_, start), rows,
                                     channels, scratch, out, factors_, act_);
  }

 private:
  template <typename P>
  static P* from(P* p, int64_t start) {
    return p ? p + start : nullptr;
  }

  const Normalization<A> normalization_;
  const NormalizeFactors<A> factors_;
  const Act<A> act_;
  const T* const residual_;
  T* const gradients_;
};

// Of rows of one channel, from `start` on; `through` and `valid` may be null.
template <typename T, typename A = Accumulate<T>>
GradSums sums_of_rows(const T* dy, const T* x, const A* mean, int64_t start, int64_t rows, int64_t values,
                      int64_t stride, int64_t channel, const Through<T>* through, const uint8_t* valid) {
  if (through) return through->rows(dy, x, start, rows, values, stride, channel);
  if (valid == nullptr || all(valid, rows * values)) {
    return loops<T>().grad_sums(dy + start, x + start, mean[channel], rows, values, stride);
  }
  return loops<T>().masked_grad_sums(dy + start, x + start, mean[channel], valid, rows, values, stride);
}

// `through` and `mask` may be null.
template <typename T, typename A = Accumulate<T>>
void planar_sums(const T* dy, const T* x, const A* mean, const Geometry& g, double* sums, const Through<T>* through,
                 const Mask* mask) {
  const PlanarParts parts(g);
  std::vector<GradSums> results(g.channels * parts.count());
  parallel_over(results.size(), g.rows() / parts.count(), [&](int64_t begin, int64_t end) {
    Made made;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t channel = unit / parts.count(), stride = g.channels * g.inner;
      parts.for_each_span(unit % parts.count(), [&](int64_t sample, int64_t offset, int64_t rows, int64_t values) {
        const int64_t start = channel * g.inner + sample * stride + offset;
        const uint8_t* valid = mask ? positions_at(*mask, sample * g.inner + offset, rows * values, made) : nullptr;
        const GradSums span = sums_of_rows(dy, x, mean, start, rows, values, stride, channel, through, valid);
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

template <typename T, typename A = Accumulate<T>>
void interleaved_sums(const T* dy, const T* x, const A* mean, const Geometry& g, double* sums,
                      const Through<T>* through, const Mask* mask) {
  const RowParts parts(g);
  const int64_t width = 2 * g.channels;
  std::vector<double> results(parts.count() * width);
  parallel_over(parts.count(), g.rows() * g.channels / parts.count(), [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(width);
    std::vector<double> tile(width);
    RowList list(mask);
    for (int64_t part = begin; part < end; ++part) {
      parts.for_each_tile(part, [&](int64_t row, int64_t rows) {
        const int64_t offset = row * g.channels;
        if (through) {
          through->columns(dy, x, offset, rows, g.channels, scratch.data(), tile.data());
        } else {
          const int64_t count = list.fill(row, rows);
          loops<T>().grad_sums_columns(dy + offset, x + offset, mean, list.data(), count, g.channels, scratch.data(),
                                       tile.data());
        }
        for (int64_t c = 0; c < width; ++c) results[part * width + c] += tile[c];
      });
    }
  });
  for (int64_t part = 0; part < parts.count(); ++part) {
    for (int64_t c = 0; c < width; ++c) sums[c] += results[part * width + c];
  }
}

// Where there is no activation.
struct NotThrough {
  template <typename Storage>
  std::unique_ptr<Through<typename Storage::type>> operator()(Storage) const {
    return nullptr;
  }
};

using Sums = std::tuple<Tensor, Tensor, Tensor>;

// `start(TypeTag<T>())` gives the way through an activation of values of type T, or null; `mask` may be null.
template <typename Start>
Sums backward_reduce(const Tensor& grad_output, const Tensor& input, const Laid& laid, const Tensor& mean,
                     const Tensor& invstd, const std::optional<Tensor>& weight, const Words& words, const Start& start,
                     const Mask* mask) {
  const Geometry& g = laid.geometry;
  const Tensor grads = laid_out_like(grad_output, laid);
  const int64_t width = 2 * g.channels;
  const ScalarType parameter_dtype = weight ? scalar_type(*weight) : accumulate_type(scalar_type(input));
  Tensor sums = allocate_vector(width + words.count, accumulate_type(scalar_type(input)), input);
  Tensor grad_weight = allocate_vector(g.channels, parameter_dtype, input);
  Tensor grad_bias = allocate_vector(g.channels, parameter_dtype, input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    const ChannelArray<A> means(mean), invstds(invstd);
    std::vector<double> totals(width);
    const T* dy = static_cast<const T*>(grads.const_data_ptr());
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    if (input.numel() > 0) {
      const std::unique_ptr<Through<T>> through = start(storage);
      (g.interleaved ? interleaved_sums<T> : planar_sums<T>)(dy, x, means.data(), g, totals.data(), through.get(),
                                                             mask);
    }
    A* sums_out = static_cast<A*>(sums.mutable_data_ptr());
    for (int64_t c = 0; c < width; ++c) sums_out[c] = static_cast<A>(totals[c]);
    pack_words(sums_out + width, words);
    write_channels(grad_weight, [&](int64_t c) { return invstds[c] * static_cast<A>(totals[g.channels + c]); });
    write_channels(grad_bias, [&](int64_t c) { return totals[c]; });
  });
  return {sums, grad_weight, grad_bias};
}

// Those of g = dy * act'(z); `grad`, in the layout of `laid`, receives g, and may be null if the activation is cheap.
Sums reduce_through(const Tensor& grad_output, const Tensor& input, const Laid& laid, const Tensor& mean,
                    const Tensor& invstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                    const Activation& activation, const Words& words, const Tensor* grad) {
  const auto start = [&](auto storage) {
    using T = typename decltype(storage)::type;
    T* const gradients = grad ? static_cast<T*>(grad->mutable_data_ptr()) : nullptr;
    return std::make_unique<Through<T>>(weight, bias, mean, invstd, laid.geometry, activation, gradients);
  };
  return backward_reduce(grad_output, input, laid, mean, invstd, weight, words, start, nullptr);
}

}  // namespace

Tensor gradient_through(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& invstd, int64_t activation,
                        double parameter) {
  const Laid laid = lay_out(input);
  const Tensor grad = allocate_like(laid.tensor);
  reduce_through(grad_output, input, laid, mean, invstd, weight, bias, {std::nullopt, activation, parameter}, {},
                 &grad);
  return with_strides_of(grad, laid, input);
}

Sums batch_norm_backward_reduce(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                const Tensor& invstd, const std::optional<Tensor>& weight,
                                std::optional<int64_t> fingerprint, const std::optional<Tensor>& positions,
                                const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                                int64_t activation, double parameter, std::optional<Tensor> grad) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  if (grad) check_like_input(*grad, "grad", input);
  const std::optional<Mask> mask = mask_of(positions, input);
  const Words words = words_of_sums(fingerprint);
  const Laid laid = lay_out(input);
  if (activation == 0 && !grad) {
    return backward_reduce(grad_output, input, laid, mean, invstd, weight, words, NotThrough(),
                           mask ? &*mask : nullptr);
  }
  check_act(input, weight, bias, residual, activation);
  const Activation act = activation_of(residual, activation, parameter, laid);
  if (is_cheap(activation) && !grad && !mask) {
    return reduce_through(grad_output, input, laid, mean, invstd, weight, bias, act, words, nullptr);
  }
  Tensor made = grad ? laid_out_like(*grad, laid) : allocate_like(laid.tensor);
  Sums sums = reduce_through(grad_output, input, laid, mean, invstd, weight, bias, act, words, &made);
  if (mask) {
    made = cleared(made, *mask);
    sums = backward_reduce(made, input, laid, mean, invstd, weight, words, NotThrough(), &*mask);
  }
  if (grad && made.const_data_ptr() != grad->const_data_ptr()) torch::stable::copy_(*grad, made);
  return sums;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_reduce));
}
