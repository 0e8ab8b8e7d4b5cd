// batch_norm_masked_backward_elemt: the gradient of the input, which passes through the statistics only where a
// position counts.

#include <limits>

#include "../checks.h"
#include "../geometry.h"
#include "channels.h"
#include "mask.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

// dx for positions that count, and for the others: dx = dy * scale, which is that with no mean_dy and no projection.
template <typename T, typename A = Accumulate<T>>
struct MaskedGradient {
  const T* dy;
  const T* x;
  T* dx;
  const bool* mask;
  const LaneBits<A>* lanes;
  Geometry g;
  GradientFactors<A> inside, outside;

  // `count` rows of the same n values each, those of the channels from `channel` on.
  void planar(int64_t o, int64_t rows, int64_t n, int64_t channel, bool counts) const {
    // In place of x is dy where x does not count, since 0 times x need not be 0.
    loops<T>().grad_rows(dy + o, counts ? x + o : dy + o, dx + o, rows, n, channel, g.channels,
                         counts ? inside : outside);
  }

  // The rows [begin, end) of (batch, channels).
  void planar_rows(int64_t begin, int64_t end) const {
    while (begin < end) {
      const int64_t sample = begin / g.channels, last = std::min(end, (sample + 1) * g.channels);
      const bool* valid = mask + sample * g.inner;
      const std::vector<Run> runs = runs_of(valid, g.inner);
      if (runs.size() == 1 && runs[0].kind != Run::kSome) {
        planar(begin * g.inner, last - begin, g.inner, begin % g.channels, runs[0].kind == Run::kAll);
      } else {
        for (int64_t row = begin; row < last; ++row) {
          for (const Run& run : runs) {
            const int64_t o = row * g.inner + run.begin;
            if (run.kind == Run::kSome) {
              loops<T>().masked_grad_row(dy + o, x + o, dx + o, lanes + sample * g.inner + run.begin, run.count,
                                         row % g.channels, inside);
            } else {
              planar(o, 1, run.count, row % g.channels, run.kind == Run::kAll);
            }
          }
        }
      }
      begin = last;
    }
  }

  // The rows [begin, end) of (batch * inner).
  void interleaved_rows(int64_t begin, int64_t end) const {
    while (begin < end) {
      const bool counts = mask[begin];
      const int64_t last = std::find(mask + begin, mask + end, !counts) - mask, o = begin * g.channels;
      loops<T>().grad_columns(dy + o, counts ? x + o : dy + o, dx + o, last - begin, g.channels,
                              counts ? inside : outside);
      begin = last;
    }
  }
};

}  // namespace

Tensor batch_norm_masked_backward_elemt(const Tensor& grad_output, const Tensor& input,
                                        const std::optional<Tensor>& weight, const Tensor& mean, const Tensor& invstd,
                                        const Tensor& sums, const Tensor& count, const Tensor& mask, int64_t ranks,
                                        int64_t call, const std::optional<Tensor>& fault) {
  check_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, fault);
  check_mask(mask, input);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const Tensor grads = laid_out_like(grad_output, laid);
  Tensor grad_input = allocate_like(laid.tensor);
  const ChannelArray<double> totals(sums);
  bool same = true;
  for (int64_t w = 2 * g.channels; w < sums.numel(); w += 2) same &= same_word(totals[w], totals[w + 1], ranks);
  if (!same) record_fault<double>(record_of(fault), {Fault::kSum, call}, nullptr, 0, 0);
  if (input.numel() == 0) return with_strides_of(grad_input, laid, input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    const ChannelArray<A> means(mean), invstds(invstd), weights(weight, g.channels, A(1));
    std::vector<A> mean_dy(g.channels), projections(g.channels), scales(g.channels), zeros(g.channels);
    const double number = static_cast<double>(*static_cast<const int64_t*>(count.const_data_ptr()));
    const double inverse = same ? 1.0 / number : std::numeric_limits<double>::quiet_NaN();
    for (int64_t c = 0; c < g.channels; ++c) {
      mean_dy[c] = static_cast<A>(totals[c] * inverse);
      projections[c] = static_cast<A>(totals[g.channels + c] * inverse * invstds[c] * invstds[c]);
      scales[c] = invstds[c] * weights[c];
    }
    const bool stream = streams(grad_input, g);
    const bool* valid = static_cast<const bool*>(mask.const_data_ptr());
    const std::vector<LaneBits<A>> lanes = lanes_of<A>(valid, g.interleaved ? 0 : g.rows());
    const MaskedGradient<T> gradient{static_cast<const T*>(grads.const_data_ptr()),
                                     static_cast<const T*>(laid.tensor.const_data_ptr()),
                                     static_cast<T*>(grad_input.mutable_data_ptr()),
                                     valid,
                                     lanes.data(),
                                     g,
                                     {means.data(), mean_dy.data(), projections.data(), scales.data(), stream},
                                     {zeros.data(), zeros.data(), zeros.data(), scales.data(), stream}};
    if (g.interleaved) {
      parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) { gradient.interleaved_rows(begin, end); });
    } else {
      parallel_over(g.batch * g.channels, g.inner,
                    [&](int64_t begin, int64_t end) { gradient.planar_rows(begin, end); });
    }
  });
  return with_strides_of(grad_input, laid, input);
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_masked_backward_elemt", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_masked_backward_elemt));
}
