// batch_norm_masked_stats: mean, biased variance and count of the positions that count, packed.
//
// A span that is whole takes the loops without a mask, a long row the ones with. Where neither is, or too few values
// come early, those that count are moved together first.

#include <cstring>

#include "../checks.h"
#include "../geometry.h"
#include "../packed_stats.h"
#include "channels.h"
#include "mask.h"
#include "moments.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

// Writes the values of x that count to `out`, which has room for one more; returns how many. Without a branch on single
// positions, of which none can be foretold.
template <typename T>
int64_t compact(const T* x, const bool* mask, int64_t n, T* out) {
  constexpr int64_t kWord = 8;
  constexpr uint64_t kWhole = 0x0101010101010101;
  int64_t kept = 0, j = 0;
  const auto keep = [&](int64_t i) {
    out[kept] = x[i];
    kept += mask[i];
  };
  for (; j + kWord <= n; j += kWord) {
    uint64_t word;
    std::memcpy(&word, mask + j, kWord);
    if (word == kWhole) {
      std::memcpy(out + kept, x + j, kWord * sizeof(T));
      kept += kWord;
    } else if (word != 0) {
      for (int64_t i = j; i < j + kWord; ++i) keep(i);
    }
  }
  for (; j < n; ++j) keep(j);
  return kept;
}

template <typename T>
void planar_stats(const T* x, const bool* mask, const Geometry& g, double* mean, double* m2) {
  const PlanarParts parts(g);
  std::vector<Part> results(g.channels * parts.count());
  const auto moments = loops<T>().moments;
  const int64_t stride = g.channels * g.inner;
  const std::vector<LaneBits<Accumulate<T>>> lanes = lanes_of<Accumulate<T>>(mask, g.rows());
  parallel_over(results.size(), g.rows() / parts.count(), [&](int64_t begin, int64_t end) {
    std::vector<T> kept;
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* channel = x + (unit / parts.count()) * g.inner;
      parts.for_each_span(unit % parts.count(), [&](int64_t sample, int64_t offset, int64_t rows, int64_t values) {
        const T* span = channel + sample * stride + offset;
        const bool* valid = mask + sample * g.inner + offset;
        bool whole = true;
        for (int64_t row = 0; row < rows; ++row) whole &= all(valid + row * g.inner, values);
        if (whole) {
          results[unit].add(static_cast<double>(rows * values), moments(span, rows, values, stride));
          return;
        }
        if (rows == 1) {
          const int64_t sampled = std::count(valid, valid + std::min(kSample, values), true);
          const int64_t counting = std::count(valid, valid + values, true);
          if (counting == 0) return;
          if (64 * sampled >= counting) {
            const auto* bits = lanes.data() + sample * g.inner + offset;
            results[unit].add(static_cast<double>(counting),
                              loops<T>().masked_moments(span, bits, values, sampled, counting));
            return;
          }
        }
        kept.resize(rows * values + 1);
        int64_t count = 0;
        for (int64_t row = 0; row < rows; ++row) {
          count += compact(span + row * stride, valid + row * g.inner, values, kept.data() + count);
        }
        if (count > 0) results[unit].add(static_cast<double>(count), moments(kept.data(), 1, count, count));
      });
    }
  });
  for (int64_t c = 0; c < g.channels; ++c) {
    Part all_parts;
    for (int64_t p = 0; p < parts.count(); ++p) {
      const Part& part = results[c * parts.count() + p];
      all_parts.add(part.count, part.moments);
    }
    mean[c] = all_parts.moments.mean;
    m2[c] = all_parts.moments.m2;
  }
}

// Moves the rows that count to `out`; returns how many.
template <typename T>
int64_t compact_rows(const T* x, const bool* mask, int64_t rows, int64_t channels, T* out) {
  int64_t kept = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (mask[row]) std::memcpy(out + kept++ * channels, x + row * channels, channels * sizeof(T));
  }
  return kept;
}

template <typename T>
void interleaved_stats(const T* x, const bool* mask, const Geometry& g, double* mean, double* m2) {
  using A = Accumulate<T>;
  const RowParts parts(g);
  const int64_t width = 2 * g.channels;
  std::vector<double> results(parts.count() * width);
  std::vector<double> counts(parts.count());
  const auto moments = loops<T>().moments_columns;
  parallel_over(parts.count(), g.rows() * g.channels / parts.count(), [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(3 * g.channels);
    std::vector<double> tile(width);
    std::vector<T> kept;
    for (int64_t part = begin; part < end; ++part) {
      parts.for_each_tile(part, [&](int64_t row, int64_t rows) {
        const T* values = x + row * g.channels;
        if (!all(mask + row, rows)) {
          kept.resize(rows * g.channels);
          rows = compact_rows(values, mask + row, rows, g.channels, kept.data());
          values = kept.data();
        }
        if (rows == 0) return;
        moments(values, rows, g.channels, scratch.data(), tile.data());
        add_columns(&results[part * width], counts[part], tile.data(), static_cast<double>(rows), g.channels);
        counts[part] += static_cast<double>(rows);
      });
    }
  });
  double count = 0;
  for (int64_t part = 0; part < parts.count(); ++part) {
    if (counts[part] == 0) continue;
    if (part > 0) add_columns(results.data(), count, &results[part * width], counts[part], g.channels);
    count += counts[part];
  }
  std::copy_n(results.data(), g.channels, mean);
  std::copy_n(results.data() + g.channels, g.channels, m2);
}

}  // namespace

Tensor batch_norm_masked_stats(const Tensor& input, const Tensor& mask, const std::vector<int64_t>& values) {
  check_input(input);
  check_mask(mask, input);
  const Words words = words_of(values);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const bool* valid = static_cast<const bool*>(mask.const_data_ptr());
  const int64_t count = std::count(valid, valid + g.rows(), true);
  const int64_t size = packed_size(g.channels, words.count);
  Tensor packed = allocate_vector(size, accumulate_type(scalar_type(input)), input);
  dispatch_input(input, [&](auto storage, auto accumulate) {
    using T = typename decltype(storage)::type;
    using A = typename decltype(accumulate)::type;
    A* out = static_cast<A*>(packed.mutable_data_ptr());
    std::fill_n(out, size, A(0));
    pack_count(out, g.channels, count, words);
    if (count == 0 || g.channels == 0) return;  // moments that weigh nothing
    std::vector<double> mean(g.channels), m2(g.channels);
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    (g.interleaved ? interleaved_stats<T> : planar_stats<T>)(x, valid, g, mean.data(), m2.data());
    for (int64_t c = 0; c < g.channels; ++c) {
      out[c] = static_cast<A>(mean[c]);
      out[g.channels + c] = static_cast<A>(m2[c] / count);
    }
  });
  return packed;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_masked_stats", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_masked_stats));
}
