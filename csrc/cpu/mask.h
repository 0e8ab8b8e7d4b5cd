// Positions of a mask, a stretch at a time; and element-wise passes over the stretches.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../mask.h"
#include "work.h"

namespace bagua_syncbn::cpu {

// Bytes that were made of lengths, of the positions from `begin` on: the next channel may ask for the same.
struct Made {
  int64_t begin = -1;
  std::vector<uint8_t> bytes;
};

// The bytes of the positions [begin, begin + count) of (batch, inner); in `made` if lengths say which count.
inline const uint8_t* positions_at(const Mask& mask, int64_t begin, int64_t count, Made& made) {
  if (mask.positions != nullptr) return mask.positions + begin;
  if (made.begin == begin && static_cast<int64_t>(made.bytes.size()) == count) return made.bytes.data();
  made.begin = begin;
  made.bytes.resize(count);
  for (int64_t j = 0; j < count;) {
    const int64_t place = (begin + j) % mask.length, rest = std::min(count - j, mask.length - place);
    const int64_t kept = std::clamp<int64_t>(mask.lengths[(begin + j) / mask.inner] - place, 0, rest);
    std::memset(made.bytes.data() + j, 1, kept);
    std::memset(made.bytes.data() + j + kept, 0, rest - kept);
    j += rest;
  }
  return made.bytes.data();
}

// The sum of n bytes, each 1 or 0: added up in words, whose bytes do not overflow within 255 of them.
inline int64_t count_of(const uint8_t* valid, int64_t n) {
  constexpr int64_t kWord = 8, kMost = 255;
  int64_t count = 0, j = 0;
  while (j + kWord <= n) {
    const int64_t words = std::min(kMost, (n - j) / kWord);
    uint64_t sums = 0;
    for (int64_t w = 0; w < words; ++w, j += kWord) {
      uint64_t word;
      std::memcpy(&word, valid + j, kWord);
      sums += word;
    }
    constexpr uint64_t kEven = 0x00ff00ff00ff00ff;
    count += static_cast<int64_t>(((sums & kEven) + (sums >> 8 & kEven)) * 0x0001000100010001 >> 48);
  }
  for (; j < n; ++j) count += valid[j];
  return count;
}

// How many positions of a batch count.
inline int64_t count_of(const Mask& mask, int64_t batch) {
  if (mask.positions != nullptr) return count_of(mask.positions, batch * mask.inner);
  int64_t places = 0;
  for (int64_t n = 0; n < batch; ++n) places += std::clamp<int64_t>(mask.lengths[n], 0, mask.length);
  return mask.length == 0 ? 0 : places * (mask.inner / mask.length);
}

inline bool all(const uint8_t* valid, int64_t n) {
  return n == 0 || std::memchr(valid, 0, n) == nullptr;
}

// The rows of a tile that count, by their numbers in it.
class RowList {
 public:
  explicit RowList(const std::optional<Mask>& mask) : mask_(mask) {}  // without: all count

  // Takes the rows [begin, begin + rows); returns how many count. Without a branch on single positions, of which none
  // can be foretold.
  int64_t fill(int64_t begin, int64_t rows) {
    if (!mask_) return rows;
    const uint8_t* valid = positions_at(*mask_, begin, rows, made_);
    list_.resize(rows);
    int64_t count = 0;
    for (int64_t j = 0; j < rows; ++j) {
      list_[count] = j;
      count += valid[j];
    }
    return count;
  }

  // Null if all rows count.
  const int64_t* data() const { return mask_ ? list_.data() : nullptr; }

 private:
  const std::optional<Mask>& mask_;
  Made made_;
  std::vector<int64_t> list_;
};

// Positions one after another of which all count, or not.
struct Run {
  bool all;
  int64_t begin;
  int64_t count;
};

// Cuts the `n` positions of a sample into runs, at multiples of a block.
inline std::vector<Run> runs_of(const uint8_t* valid, int64_t n) {
  constexpr int64_t kBlock = 256;
  std::vector<Run> runs;
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t count = std::min(kBlock, n - j);
    const bool whole = all(valid + j, count);
    if (!runs.empty() && runs.back().all == whole) {
      runs.back().count += count;
    } else {
      runs.push_back({whole, j, count});
    }
  }
  return runs;
}

// Planar: cuts the rows [begin, end) of (batch, channels) into runs, and calls write(offset, rows, n, channel, valid)
// for rows of n values, one after another in memory, that have a run in common. `valid` is null where all count.
template <typename Write>
void for_each_run(const Mask& mask, const Geometry& g, int64_t begin, int64_t end, const Write& write) {
  Made made;
  while (begin < end) {
    const int64_t sample = begin / g.channels, last = std::min(end, (sample + 1) * g.channels);
    const uint8_t* valid = positions_at(mask, sample * g.inner, g.inner, made);
    const std::vector<Run> runs = runs_of(valid, g.inner);
    const int64_t at_once = runs.size() == 1 ? last - begin : 1;
    for (; begin < last; begin += at_once) {
      for (const Run& run : runs) {
        write(begin * g.inner + run.begin, at_once, run.count, begin % g.channels,
              run.all ? nullptr : valid + run.begin);
      }
    }
  }
}

// Shares out an element-wise pass. Planar: calls planar(offset, rows, n, channel, valid), as for_each_run.
// Interleaved: calls interleaved(offset, rows, valid), for rows of a value for each channel.
template <typename Planar, typename Interleaved>
void for_each_stretch(const Geometry& g, const std::optional<Mask>& mask, const Planar& planar,
                      const Interleaved& interleaved) {
  if (g.interleaved) {
    parallel_over(g.rows(), g.channels, [&](int64_t begin, int64_t end) {
      Made made;
      const uint8_t* valid = mask ? positions_at(*mask, begin, end - begin, made) : nullptr;
      interleaved(begin * g.channels, end - begin, valid);
    });
  } else {
    parallel_over(g.batch * g.channels, g.inner, [&](int64_t begin, int64_t end) {
      if (mask) return for_each_run(*mask, g, begin, end, planar);
      planar(begin * g.inner, end - begin, g.inner, begin % g.channels, nullptr);
    });
  }
}

}  // namespace bagua_syncbn::cpu
