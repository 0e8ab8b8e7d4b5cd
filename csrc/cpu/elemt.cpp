// batch_norm_elemt: y = (x - mean) * invstd * weight + bias.

#include "../checks.h"
#include "../geometry.h"
#include "channels.h"
#include "work.h"

namespace bagua_syncbn::cpu {

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd) {
  check_elemt(input, weight, bias, mean, invstd);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  Tensor output = allocate_like(laid.tensor);
  if (input.numel() == 0) return with_strides_of(output, laid, input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    const ChannelArray<A> means(mean), invstds(invstd), weights(weight, g.channels, A(1)),
        shifts(bias, g.channels, A(0));
    std::vector<A> scales(g.channels);
    for (int64_t c = 0; c < g.channels; ++c) scales[c] = invstds[c] * weights[c];

    const NormalizeFactors<A> factors{means.data(), scales.data(), shifts.data(), streams(output, g)};
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    T* y = static_cast<T*>(output.mutable_data_ptr());
    if (g.interleaved) {
      parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
        const int64_t offset = begin * g.channels;
        loops<T>().normalize_columns(x + offset, y + offset, end - begin, g.channels, factors);
      });
    } else {
      parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
        const int64_t offset = begin * g.inner;
        loops<T>().normalize_rows(x + offset, y + offset, end - begin, g.inner, begin % g.channels, g.channels,
                                  factors);
      });
    }
  });
  return with_strides_of(output, laid, input);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_elemt));
}
