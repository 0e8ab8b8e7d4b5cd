// batch_norm_stats: mean, biased variance and count of each channel, packed; with a mask, of the positions that count.
//
// With a mask, a span that is whole takes the loops without one. Where too few of the values that count come early,
// they are moved together first.

#include <memory>

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
int64_t compact(const T* x, const uint8_t* valid, int64_t n, T* out) {
  constexpr int64_t kWord = 8;
  constexpr uint64_t kWhole = 0x0101010101010101;
  int64_t kept = 0, j = 0;
  const auto keep = [&](int64_t i) {
    out[kept] = x[i];
    kept += valid[i];
  };
  for (; j + kWord <= n; j += kWord) {
    uint64_t word;
    std::memcpy(&word, valid + j, kWord);
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

// Adds the values of a span, `rows` rows of n values.
template <typename T>
void add_all(CountedMoments& part, const T* x, int64_t rows, int64_t n, int64_t stride) {
  const int64_t count = rows * n;
  part.add(count, loops<T>().moments(x, nullptr, rows, n, stride, std::min(kSample, n), count));
}

// Adds those of a span, `rows` rows of n values, that count. The bytes of a row follow those of the one before.
template <typename T>
void add_masked(CountedMoments& part, const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride) {
  const int64_t count = count_of(valid, rows * n);
  if (count == 0) return;
  if (count == rows * n) return add_all(part, x, rows, n, stride);
  const int64_t sampled = count_of(valid, std::min(kMaskedSample, n));
  if (64 * sampled >= count) {
    return part.add(count, loops<T>().moments(x, valid, rows, n, stride, sampled, count));
  }
  const std::unique_ptr<T[]> kept(new T[count + 1]);  // one more, which is written to and does not count
  int64_t moved = 0;
  for (int64_t row = 0; row < rows; ++row) moved += compact(x + row * stride, valid + row * n, n, kept.get() + moved);
  add_all(part, kept.get(), 1, count, count);
}

template <typename T>
void planar_stats(const T* x, const Geometry& g, const std::optional<Mask>& mask, double* mean, double* m2) {
  const PlanarParts parts(g);
  std::vector<CountedMoments> results(g.channels * parts.count());
  const int64_t stride = g.channels * g.inner;
  parallel_over(results.size(), g.rows() / parts.count(), [&](int64_t begin, int64_t end) {
    Made made;
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* channel = x + (unit / parts.count()) * g.inner;
      parts.for_each_span(unit % parts.count(), [&](int64_t sample, int64_t offset, int64_t rows, int64_t n) {
        const T* span = channel + sample * stride + offset;
        if (mask) {
          const uint8_t* valid = positions_at(*mask, sample * g.inner + offset, rows * n, made);
          return add_masked(results[unit], span, valid, rows, n, stride);
        }
        add_all(results[unit], span, rows, n, stride);
      });
    }
  });
  for (int64_t c = 0; c < g.channels; ++c) {
    CountedMoments all;
    for (int64_t p = 0; p < parts.count(); ++p) {
      const CountedMoments& part = results[c * parts.count() + p];
      all.add(part.count, part.moments);
    }
    mean[c] = all.moments.mean;
    m2[c] = all.moments.m2;
  }
}

template <typename T>
void interleaved_stats(const T* x, const Geometry& g, const std::optional<Mask>& mask, double* mean, double* m2) {
  using A = Accumulate<T>;
  const RowParts parts(g);
  const int64_t width = 2 * g.channels;
  std::vector<double> results(parts.count() * width);
  std::vector<double> counts(parts.count());
  parallel_over(parts.count(), g.rows() * g.channels / parts.count(), [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(3 * g.channels);
    std::vector<double> tile(width);
    RowList list(mask);
    for (int64_t part = begin; part < end; ++part) {
      parts.for_each_tile(part, [&](int64_t row, int64_t rows) {
        const int64_t count = list.fill(row, rows);
        if (count == 0) return;
        loops<T>().moments_columns(x + row * g.channels, list.data(), count, g.channels, scratch.data(), tile.data());
        add_columns(&results[part * width], counts[part], tile.data(), static_cast<double>(count), g.channels);
        counts[part] += static_cast<double>(count);
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

Tensor batch_norm_stats(const Tensor& input, std::optional<int64_t> speaker, int64_t call,
                        const std::optional<Tensor>& positions) {
  check_input(input);
  const std::optional<Mask> mask = mask_of(positions, input);
  const Words words = words_of_row(speaker, call);
  const Laid laid = lay_out(input);
  const Geometry& g = laid.geometry;
  const int64_t count = input.numel() == 0 ? 0 : mask ? count_of(*mask, g.batch) : g.rows();
  const int64_t size = packed_size(g.channels, words.count);
  Tensor packed = allocate_vector(size, accumulate_type(scalar_type(input)), input);
  dispatch_floating(scalar_type(input), "input", [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    using A = Accumulate<T>;
    A* out = static_cast<A*>(packed.mutable_data_ptr());
    std::fill_n(out, size, A(0));
    pack_count(out, g.channels, count, words);
    if (count == 0) return;  // moments that weigh nothing
    std::vector<double> mean(g.channels), m2(g.channels);
    const T* x = static_cast<const T*>(laid.tensor.const_data_ptr());
    (g.interleaved ? interleaved_stats<T> : planar_stats<T>)(x, g, mask, mean.data(), m2.data());
    for (int64_t c = 0; c < g.channels; ++c) {
      out[c] = static_cast<A>(mean[c]);
      out[g.channels + c] = static_cast<A>(m2[c] / count);
    }
  });
  return packed;
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_stats));
}
