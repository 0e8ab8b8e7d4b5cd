// Interleaved: rows of one value for each channel.

// Vectors whose pivots and sums stay in registers: AVX-512 has 32 of these, AVX2 and the baseline have 16.
constexpr int kVectorsAtOnce = kBytes == 64 ? 4 : 2;

template <int n>
struct Width {
  static constexpr int value = n;
};

// Calls body(width, j, load, store) for the columns of a row: kVectorsAtOnce vectors at a time, then one at a time,
// then a part of one. `width` is the number of vectors, as a type.
template <typename A, typename Body>
inline __attribute__((always_inline)) void for_each_block(int64_t channels, const Body& body) {
  const auto load = [](const auto* p) { return widen(p); };
  const auto store = [](auto* p, Vec<A> v) { narrow(p, v); };
  int64_t j = 0;
  for (; j + kVectorsAtOnce * kWidth<A> <= channels; j += kVectorsAtOnce * kWidth<A>)
    body(Width<kVectorsAtOnce>(), j, load, store);
  for (; j + kWidth<A> <= channels; j += kWidth<A>) body(Width<1>(), j, load, store);
  if (j == channels) return;
  const int64_t rest = channels - j;
  body(
      Width<1>(), j, [=](const auto* p) { return widen_part(p, rest); },
      [=](auto* p, Vec<A> v) { narrow_part(p, v, rest); });
}

// Sums are read from and written to memory once in kGroup rows. Few rows, so that they are read nearly in the order in
// which they lie: going down a long column takes half as long again.
constexpr int64_t kGroup = 8;

template <typename Body>
inline __attribute__((always_inline)) void for_each_group(int64_t rows, const Body& body) {
  for (int64_t row = 0; row < rows; row += kGroup) body(row, row + kGroup < rows ? row + kGroup : rows);
}

// How far ahead to prefetch in rows of `channels` values.
inline int64_t group_ahead(int64_t channels) {
  return kGroup * channels > kAhead ? kGroup * channels : kAhead;
}

// Each column has a pivot p. With d = x - p, the mean of n values is p + sum(d) / n, and the sum of their squared
// deviations from it is sum(d^2) - sum(d)^2 / n, whatever p is. The difference cancels only by how far p is from the
// mean, which is bounded: p is the mean of a group of the rows, and a tile has at most 32 groups.
template <typename T, typename RowAt>
inline __attribute__((always_inline)) void moments_columns_of(const T* x, const RowAt& row_at, int64_t rows,
                                                              int64_t channels, Accumulate<T>* columns, double* out) {
  using A = Accumulate<T>;
  A* const pivots = columns;
  A* const deviations = columns + channels;
  A* const squares = columns + 2 * channels;
  const int64_t ahead = group_ahead(channels);
  // The pivots are the means of the first group.
  const int64_t sampled = rows < kGroup ? rows : kGroup;
  for_each_block<A>(channels, [&](auto width, int64_t j, auto load, auto store) {
    for (int v = 0; v < decltype(width)::value; ++v) {
      const int64_t column = j + v * kWidth<A>;
      Vec<A> sum = {};
      for (int64_t row = 0; row < sampled; ++row) sum += load(x + row_at(row) * channels + column);
      store(pivots + column, sum / static_cast<A>(sampled));
      store(deviations + column, Vec<A>{});
      store(squares + column, Vec<A>{});
    }
  });
  for_each_group(rows, [&](int64_t begin, int64_t end) {
    for_each_block<A>(channels, [&](auto width, int64_t j, auto load, auto store) {
      constexpr int kVectors = decltype(width)::value;
      Vec<A> pivot[kVectors], deviation_sum[kVectors], square_sum[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        pivot[v] = load(pivots + j + v * kWidth<A>);
        deviation_sum[v] = load(deviations + j + v * kWidth<A>);
        square_sum[v] = load(squares + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
        const T* values = x + row_at(row) * channels;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const T* p = values + j + v * kWidth<A>;
          prefetch(p + ahead);
          const Vec<A> deviation = load(p) - pivot[v];
          deviation_sum[v] += deviation;
          square_sum[v] += deviation * deviation;
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(deviations + j + v * kWidth<A>, deviation_sum[v]);
        store(squares + j + v * kWidth<A>, square_sum[v]);
      }
    });
  });

  const double count = static_cast<double>(rows), inverse = 1 / count;
  for (int64_t c = 0; c < channels; ++c) {
    const double shift = deviations[c] * inverse;
    const double m2 = squares[c] - shift * shift * count;
    out[c] = pivots[c] + shift;
    out[channels + c] = m2 < 0 ? 0 : m2;
  }
}

template <typename T>
void moments_columns(const T* x, const int64_t* list, int64_t rows, int64_t channels, Accumulate<T>* columns,
                     double* out) {
  if (list == nullptr) return moments_columns_of(x, [](int64_t row) { return row; }, rows, channels, columns, out);
  moments_columns_of(x, [=](int64_t row) { return list[row]; }, rows, channels, columns, out);
}

// `gradient` as in grad_sums_of.
template <typename T, typename A, typename RowAt, typename Gradient>
inline __attribute__((always_inline)) void grad_sums_columns_of(const T* dy, const T* x, const A* mean,
                                                                const RowAt& row_at, int64_t rows, int64_t channels,
                                                                A* columns, double* out, const Gradient& gradient) {
  A* const dy_sums = columns;
  A* const dy_xmu_sums = columns + channels;
  const int64_t ahead = group_ahead(channels);
  for (int64_t c = 0; c < 2 * channels; ++c) columns[c] = 0;
  // Called instead, it would take a tenth longer.
  for_each_group(rows, [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for_each_block<A>(channels, [&](auto width, int64_t j, auto load, auto store) {
      constexpr int kVectors = decltype(width)::value;
      Vec<A> means[kVectors], sum_dy[kVectors], sum_dy_xmu[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        means[v] = load(mean + j + v * kWidth<A>);
        sum_dy[v] = load(dy_sums + j + v * kWidth<A>);
        sum_dy_xmu[v] = load(dy_xmu_sums + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
        const int64_t start = row_at(row) * channels;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t offset = start + j + v * kWidth<A>;
          prefetch(dy + offset + ahead);
          prefetch(x + offset + ahead);
          const Vec<A> value = load(x + offset);
          const Vec<A> grad = gradient(load(dy + offset), value, offset, j + v * kWidth<A>, load, store);
          sum_dy[v] += grad;
          sum_dy_xmu[v] += grad * (value - means[v]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(dy_sums + j + v * kWidth<A>, sum_dy[v]);
        store(dy_xmu_sums + j + v * kWidth<A>, sum_dy_xmu[v]);
      }
    });
  });
  for (int64_t c = 0; c < 2 * channels; ++c) out[c] = columns[c];
}

template <typename T, typename A = Accumulate<T>>
void grad_sums_columns(const T* dy, const T* x, const A* mean, const int64_t* list, int64_t rows, int64_t channels,
                       A* columns, double* out) {
  if (list == nullptr) {
    const auto every = [](int64_t row) { return row; };
    return grad_sums_columns_of(dy, x, mean, every, rows, channels, columns, out, AsGiven());
  }
  const auto listed = [=](int64_t row) { return list[row]; };
  grad_sums_columns_of(dy, x, mean, listed, rows, channels, columns, out, AsGiven());
}

// The vectors of a row: body(j) for each, and tail(j, count) for the last count < kWidth values. Row by row: going down
// a block of columns would read and write memory in pieces, at half the speed.
template <typename A, typename Body, typename Tail>
inline __attribute__((always_inline)) void for_each_column(int64_t channels, const Body& body, const Tail& tail) {
  int64_t j = 0;
#pragma GCC unroll 4
  for (; j + kWidth<A> <= channels; j += kWidth<A>) body(j);
  if (j < channels) tail(j, channels - j);
}

// A row that does not count: y = x * scale, or 0 if there is no scale.
template <bool kStream, typename T, typename A>
void scale_row(const T* x, T* y, int64_t channels, const A* scale) {
  for_each_column<A>(
      channels, [=](int64_t j) { narrow<kStream>(y + j, scale ? widen(x + j) * widen(scale + j) : Vec<A>{}); },
      [=](int64_t j, int64_t count) {
        narrow_part(y + j, scale ? widen_part(x + j, count) * widen_part(scale + j, count) : Vec<A>{}, count);
      });
}

template <bool kStream, typename T, typename A>
void normalize_columns_to(const T* x, T* y, const uint8_t* valid, int64_t rows, int64_t channels,
                          const NormalizeFactors<A>& factors) {
  const A *const mean = factors.mean, *const scale = factors.scale, *const shift = factors.shift;
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    if (valid && !valid[row]) {
      scale_row<kStream, T, A>(x, y, channels, nullptr);
      continue;
    }
    for_each_column<A>(
        channels,
        [=](int64_t j) {
          prefetch(x + j + kAhead);
          narrow<kStream>(y + j, (widen(x + j) - widen(mean + j)) * widen(scale + j) + widen(shift + j));
        },
        [=](int64_t j, int64_t count) {
          const Vec<A> scaled = (widen_part(x + j, count) - widen_part(mean + j, count)) * widen_part(scale + j, count);
          narrow_part(y + j, scaled + widen_part(shift + j, count), count);
        });
  }
}

template <typename T, typename A = Accumulate<T>>
void normalize_columns(const T* x, T* y, const uint8_t* valid, int64_t rows, int64_t channels,
                       NormalizeFactors<A> factors) {
  if (!factors.stream) return normalize_columns_to<false>(x, y, valid, rows, channels, factors);
  normalize_columns_to<true>(x, y, valid, rows, channels, factors);
  end_streaming();
}

template <bool kStream, typename T, typename A>
void grad_columns_to(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t channels,
                     const GradientFactors<A>& factors, bool zeroes) {
  const A *const mean = factors.mean, *const mean_dy = factors.mean_dy;
  const A *const projection = factors.projection, *const scale = factors.scale;
  for (int64_t row = 0; row < rows; ++row, dy += channels, x += channels, dx += channels) {
    if (valid && !valid[row]) {
      scale_row<kStream, T, A>(dy, dx, channels, zeroes ? nullptr : scale);
      continue;
    }
    for_each_column<A>(
        channels,
        [=](int64_t j) {
          prefetch(dy + j + kAhead);
          prefetch(x + j + kAhead);
          const Vec<A> projected = (widen(x + j) - widen(mean + j)) * widen(projection + j);
          narrow<kStream>(dx + j, ((widen(dy + j) - widen(mean_dy + j)) - projected) * widen(scale + j));
        },
        [=](int64_t j, int64_t count) {
          const Vec<A> deviation = widen_part(x + j, count) - widen_part(mean + j, count);
          const Vec<A> centered = widen_part(dy + j, count) - widen_part(mean_dy + j, count);
          const Vec<A> gradient = centered - deviation * widen_part(projection + j, count);
          narrow_part(dx + j, gradient * widen_part(scale + j, count), count);
        });
  }
}

template <typename T, typename A = Accumulate<T>>
void grad_columns(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t channels,
                  GradientFactors<A> factors, bool zeroes) {
  if (!factors.stream) return grad_columns_to<false>(dy, x, dx, valid, rows, channels, factors, zeroes);
  grad_columns_to<true>(dy, x, dx, valid, rows, channels, factors, zeroes);
  end_streaming();
}
