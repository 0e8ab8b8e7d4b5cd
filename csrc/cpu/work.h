// How the values of a tensor are shared out. All of it depends on sizes alone, never on the number of threads, so that
// the result does not either.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../layout.h"
#include "../stable_abi.h"
#include "loops.h"

namespace bagua_syncbn::cpu {

// Less work than this is not worth waking another thread for.
constexpr int64_t kGrain = 32768;

// Values that are added up in one precision before they are merged in double.
constexpr int64_t kSpan = 16384;

// Values of a tile of rows, and its rows at most.
constexpr int64_t kTileValues = 65536;
constexpr int64_t kMostTileRows = 256;

// A reduction has at least this many parts, if they are of kGrain values or more: enough for the threads of a machine.
constexpr int64_t kParts = 64;

// Calls body(begin, end) on ranges of `count` pieces of work, each of about `values` values.
template <typename Body>
void parallel_over(int64_t count, int64_t values, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / values);
  if (count <= grain) {
    body(0, count);
  } else {
    torch::stable::parallel_for(0, count, grain, body);
  }
}

// Whether to write `output` with streaming stores, which spare reading the lines that are about to be overwritten:
// where it is larger than what a core can expect of the last-level cache, so that its next reader finds it in memory
// anyway, and where every vector of every row is aligned.
template <typename T>
bool streams(const T* output, const Geometry& g) {
  constexpr int64_t kLarge = int64_t(16) << 20, kLine = 64, kSize = sizeof(T);
  const int64_t row = kSize * (g.interleaved ? g.channels : g.inner);
  const auto address = reinterpret_cast<uintptr_t>(output);
  return g.rows() * g.channels * kSize >= kLarge && row % kLine == 0 && address % kLine == 0;
}

// Planar reductions: the (batch, inner) values of a channel are cut into parts, along the batch first, and parts into
// spans of about kSpan values. Calls add(result, channel, sample, offset, rows, n) for each span, of `rows` rows of n
// values; returns the result of each channel. A Result adds another one by add(). There are values.
template <typename Result, typename AddSpan>
std::vector<Result> reduce_planar(const Geometry& g, const AddSpan& add) {
  const int64_t wanted = std::clamp<int64_t>(kParts / g.channels, 1, std::max<int64_t>(1, g.rows() / kGrain));
  const int64_t along_batch = std::min(wanted, g.batch), along_inner = wanted / along_batch;
  const int64_t parts = along_batch * along_inner;
  std::vector<Result> results(g.channels * parts);
  parallel_over(g.channels * parts, g.rows() / parts, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit % parts / along_inner, i = unit % along_inner;
      const int64_t batch_end = g.batch * (b + 1) / along_batch, inner_end = g.inner * (i + 1) / along_inner;
      const int64_t inner_begin = g.inner * i / along_inner;
      if (inner_begin == inner_end) continue;
      // At most 64 rows, so that the first row is not too small a sample of them (see moments in loops/planar.inl).
      const int64_t rows = std::clamp<int64_t>(kSpan / (inner_end - inner_begin), 1, 64);
      for (int64_t n = g.batch * b / along_batch; n < batch_end; n += rows) {
        for (int64_t s = inner_begin; s < inner_end; s += kSpan) {
          add(results[unit], unit / parts, n, s, std::min(rows, batch_end - n), std::min(kSpan, inner_end - s));
        }
      }
    }
  });
  std::vector<Result> totals(g.channels);
  for (int64_t unit = 0; unit < g.channels * parts; ++unit) totals[unit / parts].add(results[unit]);
  return totals;
}

// Interleaved reductions: the rows are cut into parts, and parts into tiles; two tiles fit the L2 cache. Calls
// tile_of(row, rows, scratch, out) for each tile, which writes two results for each channel, [2][channels], and returns
// how many of the rows count; `scratch` has 3 * channels values. merge(all, count, part, added) adds results of `added`
// rows to those of `count`. The input must not be empty.
template <typename A, typename TileOf, typename Merge>
std::vector<double> reduce_interleaved(const Geometry& g, const TileOf& tile_of, const Merge& merge) {
  const int64_t rows = g.rows(), width = 2 * g.channels;
  const int64_t tile_rows = std::clamp<int64_t>(kTileValues / g.channels, 8, kMostTileRows);
  const int64_t parts =
      std::clamp<int64_t>(rows / tile_rows, 1, std::clamp<int64_t>(rows * g.channels / kGrain, 1, kParts));
  std::vector<double> results(parts * width);
  std::vector<int64_t> counts(parts);
  const auto add = [&](int64_t part, const double* values, int64_t added) {
    if (added == 0) return;
    merge(&results[part * width], counts[part], values, added);
    counts[part] += added;
  };
  parallel_over(parts, rows * g.channels / parts, [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(3 * g.channels);
    std::vector<double> tile(width);
    for (int64_t part = begin; part < end; ++part) {
      const int64_t last = rows * (part + 1) / parts;
      for (int64_t row = rows * part / parts; row < last; row += tile_rows) {
        add(part, tile.data(), tile_of(row, std::min(tile_rows, last - row), scratch.data(), tile.data()));
      }
    }
  });
  for (int64_t part = 1; part < parts; ++part) add(0, &results[part * width], counts[part]);
  results.resize(width);
  return results;
}

// Shares out an element-wise pass: calls write(offset, rows, valid), with `valid` as the loops take it. `positions` has
// a byte for each of (batch, inner), or is null.
template <typename Write>
void for_each_stretch(const Geometry& g, const uint8_t* positions, const Write& write) {
  if (g.interleaved) {
    return parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
      write(begin * g.channels, Rows{end - begin, g.channels, 0, g.channels}, positions ? positions + begin : nullptr);
    });
  }
  parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // sample by sample, if there is a mask
      const int64_t sample = begin / g.channels, last = positions ? std::min(end, (sample + 1) * g.channels) : end;
      const uint8_t* valid = positions ? positions + sample * g.inner : nullptr;
      if (valid && std::memchr(valid, 0, g.inner) == nullptr) valid = nullptr;
      write(begin * g.inner, Rows{last - begin, g.inner, begin % g.channels, g.channels}, valid);
      begin = last;
    }
  });
}

}  // namespace bagua_syncbn::cpu
