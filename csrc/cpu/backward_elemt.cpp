// batch_norm_backward_elemt: the gradient of the input, given the sums over all ranks. Recomputes the derivative of an
// activation, or applies a mask: invalid positions get no gradient through the statistics.

#include <limits>

#include "channels.h"
#include "kernels.h"
#include "work.h"

namespace bagua_syncbn::cpu {

void backward_elemt(const void* grads, const void* input, void* grad_input, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const uint8_t* mask, const Epilogue& epilogue, Device&) {
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const A *sum_dy = static_cast<const A*>(arguments.sums), *sum_dy_xmu = sum_dy + g.channels;
    const bool same = sums_headers_agree(sum_dy + 2 * g.channels, arguments.header_size, arguments.ranks);
    if (!same) record_fault<A>(arguments.fault, {Fault::kSum, arguments.message_number}, nullptr, 0, 0);
    const double inverse = same ? 1.0 / *arguments.count : std::numeric_limits<double>::quiet_NaN();
    const ChannelFactors<A> channel(arguments.factors, g.channels, epilogue.parameter);
    std::vector<A> mean_dy(g.channels), projections(g.channels);
    for (int64_t c = 0; c < g.channels; ++c) {
      const A inverse_std = channel.invstd[c];
      mean_dy[c] = static_cast<A>(sum_dy[c] * inverse);
      projections[c] = static_cast<A>(sum_dy_xmu[c] * inverse * inverse_std * inverse_std);
    }
    const T *dy = static_cast<const T*>(grads), *x = static_cast<const T*>(input);
    T* dx = static_cast<T*>(grad_input);
    const GradientFactors<A> factors{channel.factors(streams(dx, g)), mean_dy.data(), projections.data()};
    const auto gradient = loops<T>().activated[epilogue.activation].gradient[g.interleaved];
    for_each_stretch(g, mask, [&](int64_t o, Rows rows, const uint8_t* valid) {
      gradient(dy + o, x + o, dx + o, valid, rows, factors);
    });
  });
}

}  // namespace bagua_syncbn::cpu
