// batch_norm_backward_elemt: the gradient of the input, from the sums of all ranks. It goes through an activation
// first; or, with a mask, it passes through the statistics only where a position counts.

#include <limits>

#include "../checks.h"
#include "mask.h"
#include "normalization.h"
#include "work.h"

namespace bagua_syncbn::cpu {

Tensor batch_norm_backward_elemt(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                                 const Tensor& mean, const Tensor& invstd, const Tensor& sums, const Tensor& count,
                                 int64_t ranks, const std::optional<Tensor>& fault, int64_t call,
                                 const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                                 int64_t activation, double parameter, std::optional<Tensor> into) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault, into);
  if (activation != 0) check_act(input, weight, bias, std::nullopt, activation);
  const std::vector<uint8_t> positions = positions_of(mask_without_act(mask, input, activation), input.size(0));
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const Tensor grads = laid_out_like(grad_output, laid);
  Tensor grad_input = into ? laid_out_like(*into, laid) : allocate_like(laid.tensor);

  const ChannelArray<double> totals(sums);
  bool same = true;
  for (int64_t w = 2 * g.channels; w < sums.numel(); w += 2) same &= same_word(totals[w], totals[w + 1], ranks);
  if (!same) record_fault<double>(record_of(fault), {Fault::kSum, call}, nullptr, 0, 0);
  const auto number = static_cast<double>(*static_cast<const int64_t*>(count.const_data_ptr()));
  const double inverse = same ? 1.0 / number : std::numeric_limits<double>::quiet_NaN();

  const auto compute = [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    const Normalization<A> normalization(weight, activation ? bias : std::nullopt, mean, invstd, g.channels, parameter);
    std::vector<A> mean_dy(g.channels), projections(g.channels);
    for (int64_t c = 0; c < g.channels; ++c) {
      const A inverse_std = normalization.invstd[c];
      mean_dy[c] = static_cast<A>(totals[c] * inverse);
      projections[c] = static_cast<A>(totals[g.channels + c] * inverse * inverse_std * inverse_std);
    }
    const GradientFactors<A> factors{normalization.factors(streams(grad_input, g)), mean_dy.data(), projections.data()};
    const T *dy = data_of<T>(grads), *x = data_of<T>(laid.tensor);
    T* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    const auto gradient = loops<T>().activated[activation].gradient[g.interleaved];
    for_each_stretch(g, mask ? positions.data() : nullptr, [&](int64_t o, Rows rows, const uint8_t* valid) {
      gradient(dy + o, x + o, dx + o, valid, rows, factors);
    });
  };
  if (input.numel() > 0) dispatch_floating(scalar_type(input), "input", compute);
  if (!into) return with_strides_of(grad_input, laid, input);
  if (grad_input.get() != into->get()) torch::stable::copy_(*into, grad_input);
  return allocate_vector(0, scalar_type(input), input);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_backward_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_backward_elemt));
}
