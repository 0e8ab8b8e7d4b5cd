// batch_norm_stats: packs mean, biased variance and count of each channel, of the valid positions if there is a mask.

#include "channels.h"
#include "kernels.h"
#include "mask.h"
#include "work.h"

namespace bagua_syncbn::cpu {
namespace {

// Chan, Golub and LeVeque: merges the moments of `added` values into those of `count` values.
struct MergeMoments {
  double share;   // of the added values in all values
  double weight;  // of the squared difference of the means
  MergeMoments(double count, double added) : share(added / (count + added)), weight(count * share) {}

  void operator()(double& mean, double& m2, double added_mean, double added_m2) const {
    const double difference = added_mean - mean;
    mean += difference * share;
    m2 += added_m2 + difference * difference * weight;
  }
};

// Returns [mean | m2]. `positions` as in for_each_stretch.
template <typename T>
std::vector<double> planar_stats(const T* x, const Geometry& g, const uint8_t* positions) {
  constexpr int64_t kSample = 256, kMaskedSample = 1024;
  const int64_t stride = g.channels * g.inner;
  return reduce_planar<MergeMoments>(
      g, [&](int64_t channel, int64_t sample, int64_t offset, int64_t rows, int64_t n, Pair& moments) {
        const uint8_t* valid = positions ? positions + sample * g.inner + offset : nullptr;
        const int64_t count = valid ? count_of(valid, rows * n) : rows * n;
        if (count == 0) return count;
        Sample first{1, std::min(kSample, n), std::min(kSample, n)};
        if (count == rows * n) {
          valid = nullptr;
        } else {
          first = {1, std::min(kMaskedSample, n), count_of(valid, std::min(kMaskedSample, n))};
          if (64 * first.count < count) first = {rows, n, count};
        }
        const T* span = x + sample * stride + channel * g.inner + offset;
        moments = loops<T>().moments(span, valid, rows, n, stride, first, count);
        return count;
      });
}

template <typename T>
std::vector<double> interleaved_stats(const T* x, const Geometry& g, const uint8_t* positions) {
  using A = Accumulate<T>;
  return reduce_interleaved<MergeMoments, A>(g, [&](int64_t row, int64_t rows, A* scratch, double* out) {
    int64_t list[kMaxTileRows], count = positions ? 0 : rows;  // the valid rows
    for (int64_t j = 0; positions && j < rows; ++j) {          // without a branch, which could not be predicted
      list[count] = j;
      count += positions[row + j];
    }
    const T* tile = x + row * g.channels;
    if (count > 0) loops<T>().moments_columns(tile, positions ? list : nullptr, count, g.channels, scratch, out);
    return count;
  });
}

}  // namespace

void stats(const void* x, DType dtype, const Geometry& g, const Mask* mask, void* packed, const Header& header,
           Device&) {
  const std::vector<uint8_t> bytes = positions_of(mask, g.batch);
  const uint8_t* positions = mask ? bytes.data() : nullptr;
  const int64_t count = positions ? count_of(positions, g.rows()) : g.rows();
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Stored;
    std::vector<double> moments(2 * g.channels);  // zeros if there are no values
    if (count > 0)
      moments = (g.interleaved ? interleaved_stats<T> : planar_stats<T>)(static_cast<const T*>(x), g, positions);
    for (int64_t c = 0; c < g.channels; ++c) {
      const double mean = moments[c], m2 = moments[g.channels + c];
      pack_moments<Accumulate<T>>(packed, g.channels, c, mean, m2, static_cast<double>(count), header);
    }
  });
}

void write_zeros_and_header(const Header& header, void* target, int64_t zeros, DType accumulate, Device&) {
  dispatch(accumulate, [&](auto tag) {
    using A = Accumulate<typename decltype(tag)::Stored>;
    A* values = static_cast<A*>(target);
    std::fill_n(values, zeros, A(0));
    pack_header(values + zeros, header);
  });
}

}  // namespace bagua_syncbn::cpu
