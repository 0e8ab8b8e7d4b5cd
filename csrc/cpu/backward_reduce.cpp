// batch_norm_backward_reduce: sums of g = dy * act'(z) and of g * (x - mean) of each channel, and from them the
// gradients of weight and bias of this rank.

#include <cstring>

#include "channels.h"
#include "kernels.h"
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

void backward_reduce(const void* dy, const void* x, void* grad, DType dtype, const Geometry& g,
                     const BackwardReduceArguments& arguments, const Epilogue& epilogue, Device&) {
  const int64_t width = 2 * g.channels;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    const Normalization<A> normalization(arguments.factors, g.channels, epilogue.act.parameter);
    const Gradients<T> of{static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(epilogue.residual),
                          static_cast<T*>(grad), normalization.factors(false)};
    if (grad != nullptr && epilogue.act.code == 0) std::memcpy(grad, dy, g.rows() * g.channels * sizeof(T));
    const ActivatedLoops<T>& activated = loops<T>().activated[epilogue.act.code];
    const std::vector<double> totals = (g.interleaved ? interleaved_sums<T> : planar_sums<T>)(of, g, activated);
    A* sums = static_cast<A*>(arguments.sums);
    for (int64_t c = 0; c < width; ++c) sums[c] = static_cast<A>(totals[c]);
    pack_words(sums + width, arguments.words);
    write_channels(arguments.grad_weight, g.channels,
                   [&](int64_t c, double) { return normalization.invstd[c] * static_cast<A>(totals[g.channels + c]); });
    write_channels(arguments.grad_bias, g.channels, [&](int64_t c, double) { return totals[c]; });
  });
}

}  // namespace bagua_syncbn::cpu
