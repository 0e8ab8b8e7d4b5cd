// batch_norm_stats: per-channel mean, biased variance and count, optionally with a mask, packed for the exchange.

#include <cstring>

#include "channels.h"
#include "kernels.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

// Returns the number of valid positions: of bytes other than 0. Counts eight bytes at a time.
int64_t count_of(const uint8_t* valid, int64_t n) {
  constexpr uint64_t kOnes = 0x0101010101010101, kLow = 0x7f * kOnes;
  constexpr int64_t kWord = 8, kMost = 255;
  int64_t count = 0, j = 0;
  while (j + kWord <= n) {
    const int64_t words = std::min(kMost, (n - j) / kWord);
    uint64_t sums = 0;  // a count in each byte
    for (int64_t w = 0; w < words; ++w, j += kWord) {
      uint64_t word;
      std::memcpy(&word, valid + j, kWord);
      sums += (((word & kLow) + kLow) | word) >> 7 & kOnes;
    }
    constexpr uint64_t kEven = 0x00ff00ff00ff00ff;
    count += static_cast<int64_t>(((sums & kEven) + (sums >> 8 & kEven)) * 0x0001000100010001 >> 48);
  }
  for (; j < n; ++j) count += valid[j] != 0;
  return count;
}

// Chan, Golub and LeVeque: merges the moments of `added` values into the moments of `count` values.
struct MergeMoments {
  double share;   // added / all values
  double weight;  // factor for the squared difference of means
  MergeMoments(double count, double added) : share(added / (count + added)), weight(count * share) {}

  void operator()(double& mean, double& m2, double added_mean, double added_m2) const {
    const double difference = added_mean - mean;
    mean += difference * share;
    m2 += added_m2 + difference * difference * weight;
  }
};

// Returns [mean | m2].
template <typename T>
std::vector<double> planar_stats(const T* x, const Geometry& g, const uint8_t* mask) {
  const int64_t stride = g.channels * g.inner;
  return reduce_planar<MergeMoments>(
      g, [&](int64_t channel, int64_t sample, int64_t offset, int64_t rows, int64_t n, Pair& moments) {
        const uint8_t* valid = mask ? mask + sample * g.inner + offset : nullptr;
        const int64_t count = valid ? count_of(valid, rows * n) : rows * n;
        if (count == 0) return count;
        if (count == rows * n) valid = nullptr;
        const int64_t sampled = std::min<int64_t>(valid ? 1024 : 256, n);
        Sample first{1, sampled, valid ? count_of(valid, sampled) : sampled};
        if (64 * first.count < count) first = {rows, n, count};
        const T* span = x + sample * stride + channel * g.inner + offset;
        moments = loops<T>().moments(span, valid, rows, n, stride, first, count);
        return count;
      });
}

template <typename T>
std::vector<double> interleaved_stats(const T* x, const Geometry& g, const uint8_t* mask) {
  using A = Accumulate<T>;
  return reduce_interleaved<MergeMoments, A>(g, [&](int64_t row, int64_t rows, A* scratch, double* out) {
    int64_t list[kMaxTileRows], count = mask ? 0 : rows;  // the valid rows
    for (int64_t j = 0; mask && j < rows; ++j) {          // no branch: it would be unpredictable
      list[count] = j;
      count += mask[row + j] != 0;
    }
    const T* tile = x + row * g.channels;
    if (count > 0) loops<T>().moments_columns(tile, mask ? list : nullptr, count, g.channels, scratch, out);
    return count;
  });
}

}  // namespace

void stats(const void* x, DType dtype, const Geometry& g, const uint8_t* mask, void* packed, const Header& header,
           Device&) {
  const int64_t count = mask ? count_of(mask, g.rows()) : g.rows();
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<double> moments(2 * g.channels);  // zeros if there are no values
    if (count > 0)
      moments = (g.interleaved ? interleaved_stats<T> : planar_stats<T>)(static_cast<const T*>(x), g, mask);
    for (int64_t c = 0; c < g.channels; ++c) {
      const double mean = moments[c], m2 = moments[g.channels + c];
      pack_moments<Accumulate<T>>(packed, g.channels, c, mean, m2, static_cast<double>(count), header);
    }
  });
}

}  // namespace bagua_syncbn::cpu
