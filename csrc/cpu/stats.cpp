// batch_norm_stats: mean, biased variance and count of each channel, packed.

#include "../checks.h"
#include "../geometry.h"
#include "../packed_stats.h"
#include "channels.h"
#include "moments.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

template <typename T>
void planar_stats(const T* x, const Geometry& g, double* mean, double* m2) {
  const PlanarParts parts(g);
  std::vector<Part> results(g.channels * parts.count());
  const auto moments = loops<T>().moments;
  parallel_over(results.size(), g.rows() / parts.count(), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* channel = x + (unit / parts.count()) * g.inner;
      const int64_t stride = g.channels * g.inner;
      parts.for_each_span(unit % parts.count(), [&](int64_t sample, int64_t offset, int64_t rows, int64_t values) {
        results[unit].add(static_cast<double>(rows * values),
                          moments(channel + sample * stride + offset, rows, values, stride));
      });
    }
  });
  for (int64_t c = 0; c < g.channels; ++c) {
    Part all;
    for (int64_t p = 0; p < parts.count(); ++p) {
      const Part& part = results[c * parts.count() + p];
      all.add(part.count, part.moments);
    }
    mean[c] = all.moments.mean;
    m2[c] = all.moments.m2;
  }
}

template <typename T>
void interleaved_stats(const T* x, const Geometry& g, double* mean, double* m2) {
  using A = Accumulate<T>;
  const RowParts parts(g);
  const int64_t width = 2 * g.channels;
  std::vector<double> results(parts.count() * width);
  std::vector<double> counts(parts.count());
  const auto moments = loops<T>().moments_columns;
  parallel_over(parts.count(), g.rows() * g.channels / parts.count(), [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(3 * g.channels);
    std::vector<double> tile(width);
    for (int64_t part = begin; part < end; ++part) {
      parts.for_each_tile(part, [&](int64_t row, int64_t rows) {
        moments(x + row * g.channels, rows, g.channels, scratch.data(), tile.data());
        add_columns(&results[part * width], counts[part], tile.data(), static_cast<double>(rows), g.channels);
        counts[part] += static_cast<double>(rows);
      });
    }
  });
  double count = counts[0];
  for (int64_t part = 1; part < parts.count(); ++part) {
    add_columns(results.data(), count, &results[part * width], counts[part], g.channels);
    count += counts[part];
  }
  std::copy_n(results.data(), g.channels, mean);
  std::copy_n(results.data() + g.channels, g.channels, m2);
}

}  // namespace

Tensor batch_norm_stats(const Tensor& input, const std::vector<int64_t>& values) {
  check_input(input);
  const Words words = words_of(values);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const ScalarType dtype = accumulate_type(scalar_type(input));
  const int64_t size = packed_size(g.channels, words.count);
  Tensor packed = allocate_vector(size, dtype, input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    A* out = static_cast<A*>(packed.mutable_data_ptr());
    if (input.numel() == 0) {  // a count of 0, and moments that weigh nothing
      std::fill_n(out, size, A(0));
      pack_count(out, g.channels, 0, words);
      return;
    }
    pack_count(out, g.channels, g.rows(), words);
    std::vector<double> mean(g.channels), m2(g.channels);
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    (g.interleaved ? interleaved_stats<T> : planar_stats<T>)(x, g, mean.data(), m2.data());
    for (int64_t c = 0; c < g.channels; ++c) {
      out[c] = static_cast<A>(mean[c]);
      out[g.channels + c] = static_cast<A>(m2[c] / g.rows());
    }
  });
  return packed;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_stats));
}
