// batch_norm_backward_reduce: sums of g = dy * act'(z) and of g * (x - mean) of each channel, and from them the
// gradients of weight and bias of this rank.

#include <tuple>

#include "../checks.h"
#include "normalization.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

struct Sums : GradSums {
  void add(const GradSums& other) {
    dy += other.dy;
    dy_xmu += other.dy_xmu;
  }
};

// Returns [sum_dy | sum_dy_xmu].
template <typename T>
std::vector<double> planar_sums(const Gradients<T>& of, const Geometry& g, const ActivatedLoops<T>& loops) {
  const int64_t stride = g.channels * g.inner;
  const auto totals =
      reduce_planar<Sums>(g, [&](Sums& part, int64_t channel, int64_t sample, int64_t offset, int64_t rows, int64_t n) {
        const int64_t start = sample * stride + channel * g.inner + offset;
        part.add(loops.sums(of.from(start), rows, n, stride, channel));
      });
  std::vector<double> sums;
  for (const Sums& total : totals) sums.push_back(total.dy);
  for (const Sums& total : totals) sums.push_back(total.dy_xmu);
  return sums;
}

template <typename T>
std::vector<double> interleaved_sums(const Gradients<T>& of, const Geometry& g, const ActivatedLoops<T>& loops) {
  using A = Accumulate<T>;
  return reduce_interleaved<A>(
      g,
      [&](int64_t row, int64_t rows, A* scratch, double* out) {
        loops.sums_columns(of.from(row * g.channels), rows, g.channels, scratch, out);
        return rows;
      },
      [&](double* all, int64_t, const double* part, int64_t) {
        for (int64_t c = 0; c < 2 * g.channels; ++c) all[c] += part[c];
      });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const std::optional<Tensor>& weight, std::optional<int64_t> fingerprint, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, int64_t activation, double parameter, std::optional<Tensor> grad) {
  check_backward_reduce(grad_output, input, mean, invstd, weight);
  if (grad) check_like_input(*grad, "grad", input);
  if (activation != 0 || grad) check_act(input, weight, bias, residual, activation);
  const Words words = words_of_sums(fingerprint);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const Tensor grads = laid_out_like(grad_output, laid);
  const bool activated = activation != 0;
  if (grad && !activated) torch::stable::copy_(*grad, grad_output);
  const std::optional<Tensor> through = activated ? laid_out_like(residual, laid) : std::nullopt;
  const std::optional<Tensor> made = activated ? laid_out_like(grad, laid) : std::nullopt;
  const int64_t width = 2 * g.channels;
  const ScalarType accumulate = accumulate_type(scalar_type(input));
  const ScalarType parameter_dtype = weight ? scalar_type(*weight) : accumulate;
  Tensor sums = allocate_vector(width + words.count, accumulate, input);
  Tensor grad_weight = allocate_vector(g.channels, parameter_dtype, input);
  Tensor grad_bias = allocate_vector(g.channels, parameter_dtype, input);
  dispatch_floating(scalar_type(input), "input", [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    const std::optional<Tensor> none;
    const Normalization<A> normalization(activated ? weight : none, activated ? bias : none, mean, invstd, g.channels,
                                         parameter);
    const Gradients<T> of{data_of<T>(grads), data_of<T>(laid.tensor), data_of<T>(through),
                          made ? static_cast<T*>(made->mutable_data_ptr()) : nullptr, normalization.factors(false)};
    std::vector<double> totals(width);
    if (input.numel() > 0) {
      totals = (g.interleaved ? interleaved_sums<T> : planar_sums<T>)(of, g, loops<T>().activated[activation]);
    }
    A* sums_out = static_cast<A*>(sums.mutable_data_ptr());
    for (int64_t c = 0; c < width; ++c) sums_out[c] = static_cast<A>(totals[c]);
    pack_words(sums_out + width, words);
    write_channels(grad_weight,
                   [&](int64_t c) { return normalization.invstd[c] * static_cast<A>(totals[g.channels + c]); });
    write_channels(grad_bias, [&](int64_t c) { return totals[c]; });
  });
  if (made && made->const_data_ptr() != grad->const_data_ptr()) torch::stable::copy_(*grad, *made);
  return {sums, grad_weight, grad_bias};
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_reduce));
}
