// Splits work into pieces. Pieces depend only on sizes, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../arguments.h"
#include "../stable_abi.h"
#include "loops.h"

namespace bagua_syncbn::cpu {

// Minimum number of values per thread.
constexpr int64_t kGrain = 32768;

// Number of values that are summed in the accumulate type before they are merged in double.
constexpr int64_t kSpan = 16384;

// Maximum values and rows of a tile.
constexpr int64_t kTileValues = 65536;
constexpr int64_t kMaxTileRows = 256;

// Number of parts of a reduction if each has at least kGrain values: enough for all cores. Planar inputs with more
// channels have a part per channel.
constexpr int64_t kParts = 64;

// Calls body(begin, end) on ranges of `count` pieces with about `values` values each.
template <typename Body>
void parallel_over(int64_t count, int64_t values, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / values);
  if (count <= grain) {
    body(0, count);
  } else {
    torch::stable::parallel_for(0, count, grain, body);
  }
}

// Returns whether to use streaming stores, which do not first read the memory that they overwrite. They are used if
// `output` exceeds a core's share of the last-level cache (its next reader would miss anyway) and all vectors are
// aligned.
template <typename T>
bool streams(const T* output, const Geometry& g) {
  constexpr int64_t kLarge = int64_t(16) << 20, kLine = 64, kSize = sizeof(T);
  const int64_t row = kSize * (g.interleaved ? g.channels : g.inner);
  const auto address = reinterpret_cast<uintptr_t>(output);
  return g.rows() * g.channels * kSize >= kLarge && row % kLine == 0 && address % kLine == 0;
}

// Reductions return two results per channel, [2][channels]. Merge(count, added) merges the results of `added` values
// into the results of `count` values: merge(first, second, added_first, added_second). The input must not be empty.

// Planar: splits the rows of a channel into spans of up to kSpan values; a part is several spans. reduce(channel,
// sample, offset, rows, n, result) reduces a span of `rows` rows of n values and returns the number of valid values.
template <typename Merge, typename Reduce>
std::vector<double> reduce_planar(const Geometry& g, const Reduce& reduce) {
  struct Part {
    Pair pair;
    int64_t count = 0;
    void add(const Pair& added, int64_t added_count) {
      if (added_count == 0) return;
      Merge(count, added_count)(pair.first, pair.second, added.first, added.second);
      count += added_count;
    }
  };
  // At most 64 rows, so that the first row is a large enough sample for the pivot (see moments in loops/planar.inl).
  const int64_t rows = std::clamp<int64_t>(kSpan / g.inner, 1, 64), pieces = (g.inner + kSpan - 1) / kSpan;
  const int64_t spans = (g.batch + rows - 1) / rows * pieces;
  const int64_t parts = std::clamp<int64_t>(kParts / g.channels, 1, std::max<int64_t>(1, g.rows() / kGrain));
  std::vector<Part> results(g.channels * parts);
  parallel_over(g.channels * parts, g.rows() / parts, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t last = spans * (unit % parts + 1) / parts;
      for (int64_t span = spans * (unit % parts) / parts; span < last; ++span) {
        const int64_t n = span / pieces * rows, s = span % pieces * kSpan;
        Pair moments;
        const int64_t count =
            reduce(unit / parts, n, s, std::min(rows, g.batch - n), std::min(kSpan, g.inner - s), moments);
        results[unit].add(moments, count);
      }
    }
  });
  std::vector<double> totals(2 * g.channels);
  for (int64_t c = 0; c < g.channels; ++c) {
    Part total;
    for (int64_t part = 0; part < parts; ++part)
      total.add(results[c * parts + part].pair, results[c * parts + part].count);
    totals[c] = total.pair.first;
    totals[g.channels + c] = total.pair.second;
  }
  return totals;
}

// Interleaved: splits the rows into parts, and parts into tiles; two tiles fit the L2 cache. reduce(row, rows, scratch,
// out) reduces a tile and returns the number of valid rows. `scratch` has 3 * channels values.
template <typename Merge, typename A, typename Reduce>
std::vector<double> reduce_interleaved(const Geometry& g, const Reduce& reduce) {
  const int64_t rows = g.rows(), channels = g.channels, width = 2 * channels;
  const int64_t tile_rows = std::clamp<int64_t>(kTileValues / channels, 8, kMaxTileRows);
  const int64_t parts =
      std::clamp<int64_t>(rows / tile_rows, 1, std::clamp<int64_t>(rows * channels / kGrain, 1, kParts));
  std::vector<double> results(parts * width);
  std::vector<int64_t> counts(parts);
  const auto add = [&](int64_t part, const double* added, int64_t count) {
    if (count == 0) return;
    double* all = &results[part * width];
    const Merge merge(counts[part], count);
    for (int64_t c = 0; c < channels; ++c) merge(all[c], all[channels + c], added[c], added[channels + c]);
    counts[part] += count;
  };
  parallel_over(parts, rows * channels / parts, [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(3 * channels);
    std::vector<double> tile(width);
    for (int64_t part = begin; part < end; ++part) {
      const int64_t last = rows * (part + 1) / parts;
      for (int64_t row = rows * part / parts; row < last; row += tile_rows) {
        const int64_t count = reduce(row, std::min(tile_rows, last - row), scratch.data(), tile.data());
        add(part, tile.data(), count);
      }
    }
  });
  for (int64_t part = 1; part < parts; ++part) add(0, &results[part * width], counts[part]);
  results.resize(width);
  return results;
}

// Runs an elementwise pass: calls write(offset, rows, valid) for stretches of rows, in parallel. `mask` may be null;
// `valid` is its part for these rows, or null if all positions are valid.
template <typename Write>
void for_each_stretch(const Geometry& g, const uint8_t* mask, const Write& write) {
  if (g.interleaved) {
    return parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
      write(begin * g.channels, Rows{end - begin, g.channels, 0, g.channels}, mask ? mask + begin : nullptr);
    });
  }
  parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // one sample at a time if there is a mask
      const int64_t sample = begin / g.channels, last = mask ? std::min(end, (sample + 1) * g.channels) : end;
      const uint8_t* valid = mask ? mask + sample * g.inner : nullptr;
      if (valid && std::memchr(valid, 0, g.inner) == nullptr) valid = nullptr;
      write(begin * g.inner, Rows{last - begin, g.inner, begin % g.channels, g.channels}, valid);
      begin = last;
    }
  });
}

}  // namespace bagua_syncbn::cpu
