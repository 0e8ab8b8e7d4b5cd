// How the values of a tensor are shared out. All of it depends on sizes alone, never on the number of threads, so that
// the result does not either.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../geometry.h"

namespace bagua_syncbn::cpu {

// Less work than this is not worth waking another thread for.
constexpr int64_t kGrain = 32768;

// Values that are added up in one precision before they are merged in double.
constexpr int64_t kSpan = 16384;

// Values of a tile of rows.
constexpr int64_t kTileValues = 65536;

// A reduction has at least this many parts, if they are of kGrain values or more: enough for the threads of a machine.
constexpr int64_t kParts = 64;

// Calls body(begin, end) on ranges of `count` pieces of work, each of about `values` values.
template <typename Body>
void parallel_over(int64_t count, int64_t values, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, values));
  if (count <= grain) {
    body(0, count);
  } else {
    torch::stable::parallel_for(0, count, grain, body);
  }
}

// Whether to write `output` with streaming stores, which spare reading the lines that are about to be overwritten:
// where it is larger than what a core can expect of the last-level cache, so that its next reader finds it in memory
// anyway, and where every vector of every row is aligned.
inline bool streams(const Tensor& output, const Geometry& g) {
  constexpr int64_t kLarge = int64_t(16) << 20, kLine = 64;
  const int64_t size = output.element_size(), row = size * (g.interleaved ? g.channels : g.inner);
  const auto address = reinterpret_cast<uintptr_t>(output.const_data_ptr());
  return output.numel() * size >= kLarge && row % kLine == 0 && address % kLine == 0;
}

// Planar reductions: the (batch, inner) values of a channel are cut into parts, along the batch first.
class PlanarParts {
 public:
  explicit PlanarParts(const Geometry& g) : batch_(g.batch), inner_(g.inner) {
    const int64_t wanted =
        std::clamp<int64_t>(kParts / std::max<int64_t>(1, g.channels), 1, std::max<int64_t>(1, g.rows() / kGrain));
    along_batch_ = std::min(wanted, std::max<int64_t>(1, g.batch));
    along_inner_ = wanted / along_batch_;
  }

  int64_t count() const { return along_batch_ * along_inner_; }

  // Calls body(sample, offset, samples, values) for spans of about kSpan values, in order: `samples` rows of `values`.
  template <typename Body>
  void for_each_span(int64_t part, const Body& body) const {
    const int64_t b = part / along_inner_, i = part % along_inner_;
    const int64_t batch_begin = batch_ * b / along_batch_, batch_end = batch_ * (b + 1) / along_batch_;
    const int64_t inner_begin = inner_ * i / along_inner_, inner_end = inner_ * (i + 1) / along_inner_;
    const int64_t length = inner_end - inner_begin;
    if (length <= 0) return;
    // At most 64 rows, so that the first row is not too small a sample of them (see moments in loops/planar.inl).
    const int64_t rows = std::clamp<int64_t>(kSpan / length, 1, 64);
    for (int64_t n = batch_begin; n < batch_end; n += rows) {
      for (int64_t s = inner_begin; s < inner_end; s += kSpan) {
        body(n, s, std::min(rows, batch_end - n), std::min(kSpan, inner_end - s));
      }
    }
  }

 private:
  int64_t batch_, inner_, along_batch_, along_inner_;
};

// Interleaved reductions: the rows are cut into parts, and each part into tiles, of which two fit the L2 cache.
class RowParts {
 public:
  explicit RowParts(const Geometry& g) : rows_(g.rows()) {
    tile_rows_ = std::clamp<int64_t>(kTileValues / std::max<int64_t>(1, g.channels), 8, 256);
    parts_ = std::clamp<int64_t>(g.rows() * g.channels / kGrain, 1, kParts);
    parts_ = std::clamp<int64_t>(rows_ / tile_rows_, 1, parts_);
  }

  int64_t count() const { return parts_; }

  template <typename Body>
  void for_each_tile(int64_t part, const Body& body) const {
    const int64_t end = rows_ * (part + 1) / parts_;
    for (int64_t row = rows_ * part / parts_; row < end; row += tile_rows_) body(row, std::min(tile_rows_, end - row));
  }

 private:
  int64_t rows_, tile_rows_, parts_;
};

}  // namespace bagua_syncbn::cpu
