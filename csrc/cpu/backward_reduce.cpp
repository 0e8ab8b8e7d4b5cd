// batch_norm_backward_reduce: per-channel sums of g = dy * act'(z) and g * (x - mean), and this rank's gradients of
// weight and bias.

#include <cstring>

#include "channels.h"
#include "kernels.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

struct Add {
  Add(int64_t, int64_t) {}
  void operator()(double& first, double& second, double added_first, double added_second) const {
    first += added_first;
    second += added_second;
  }
};

// Returns [sum_dy | sum_dy_xmu].
template <typename T>
std::vector<double> planar_sums(const Gradients<T>& gradients, const Geometry& g, const ActivatedLoops<T>& loops) {
  const int64_t stride = g.channels * g.inner;
  return reduce_planar<Add>(
      g, [&](int64_t channel, int64_t sample, int64_t offset, int64_t rows, int64_t n, Pair& sums) {
        sums = loops.sums(gradients.from(sample * stride + channel * g.inner + offset), rows, n, stride, channel);
        return rows * n;
      });
}

template <typename T>
std::vector<double> interleaved_sums(const Gradients<T>& gradients, const Geometry& g, const ActivatedLoops<T>& loops) {
  using A = Accumulate<T>;
  return reduce_interleaved<Add, A>(g, [&](int64_t row, int64_t rows, A* scratch, double* out) {
    loops.sums_columns(gradients.from(row * g.channels), rows, g.channels, scratch, out);
    return rows;
  });
}

}  // namespace

void backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device&) {
  const int64_t width = 2 * g.channels;
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const ChannelFactors<A> channel(arguments.factors, g.channels, epilogue.parameter);
    const Gradients<T> gradients{static_cast<const T*>(dy), static_cast<const T*>(x),
                                 static_cast<const T*>(epilogue.residual), static_cast<T*>(grad),
                                 channel.factors(false)};
    if (grad != nullptr && epilogue.activation == 0) std::memcpy(grad, dy, g.rows() * g.channels * sizeof(T));
    const ActivatedLoops<T>& activated = loops<T>().activated[epilogue.activation];
    std::vector<double> totals(width);  // zeros for an empty input
    if (g.rows() > 0) totals = (g.interleaved ? interleaved_sums<T> : planar_sums<T>)(gradients, g, activated);
    A* sums = static_cast<A*>(arguments.sums);
    for (int64_t c = 0; c < width; ++c) sums[c] = static_cast<A>(totals[c]);
    pack_header(sums + width, arguments.header);
    write_channels(arguments.grad_weight, g.channels,
                   [&](int64_t c, double) { return channel.invstd[c] * static_cast<A>(totals[g.channels + c]); });
    write_channels(arguments.grad_bias, g.channels, [&](int64_t c, double) { return totals[c]; });
  });
}

}  // namespace bagua_syncbn::cpu
