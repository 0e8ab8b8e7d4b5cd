// Interleaved: sums over rows of one value for each channel.

// Vectors whose pivots and sums stay in registers: AVX-512 has 32 of these, AVX2 and the baseline have 16.
constexpr int kVectorsAtOnce = kBytes == 64 ? 4 : 2;

template <int n>
struct Width {
  static constexpr int value = n;
};

// Calls body(width, j, access) for the columns of a row: kVectorsAtOnce vectors at a time, then one at a time, then a
// part of one. `width` is the number of vectors, as a type.
template <typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_block(int64_t channels, const Body& body) {
  int64_t j = 0;
  for (; j + kVectorsAtOnce * kWidth<A> <= channels; j += kVectorsAtOnce * kWidth<A>)
    body(Width<kVectorsAtOnce>(), j, Whole());
  for (; j + kWidth<A> <= channels; j += kWidth<A>) body(Width<1>(), j, Whole());
  if (j < channels) body(Width<1>(), j, Part{channels - j});
}

// Sums are read from and written to memory once in kGroup rows. Few rows, so that they are read nearly in the order in
// which they lie: going down a long column takes half as long again.
constexpr int64_t kGroup = 8;

template <typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_group(int64_t rows, const Body& body) {
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
BAGUA_SYNCBN_IN_LOOPS void moments_columns_of(const T* x, const RowAt& row_at, int64_t rows, int64_t channels,
                                              Accumulate<T>* columns, double* out) {
  using A = Accumulate<T>;
  A* const pivots = columns;
  A* const deviations = columns + channels;
  A* const squares = columns + 2 * channels;
  const int64_t ahead = group_ahead(channels);
  // The pivots are the means of the first group.
  const int64_t sampled = rows < kGroup ? rows : kGroup;
  for_each_block<A>(channels, [&](auto width, int64_t j, auto access) {
    for (int v = 0; v < decltype(width)::value; ++v) {
      const int64_t column = j + v * kWidth<A>;
      Vec<A> sum = {};
      for (int64_t row = 0; row < sampled; ++row) sum += access.load(x + row_at(row) * channels + column);
      access.store(pivots + column, sum / static_cast<A>(sampled));
      access.store(deviations + column, Vec<A>{});
      access.store(squares + column, Vec<A>{});
    }
  });
  for_each_group(rows, [&](int64_t begin, int64_t end) {
    for_each_block<A>(channels, [&](auto width, int64_t j, auto access) {
      constexpr int kVectors = decltype(width)::value;
      Vec<A> pivot[kVectors], deviation_sum[kVectors], square_sum[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        pivot[v] = access.load(pivots + j + v * kWidth<A>);
        deviation_sum[v] = access.load(deviations + j + v * kWidth<A>);
        square_sum[v] = access.load(squares + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
        const T* values = x + row_at(row) * channels;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const T* p = values + j + v * kWidth<A>;
          prefetch(p + ahead);
          const Vec<A> deviation = access.load(p) - pivot[v];
          deviation_sum[v] += deviation;
          square_sum[v] += deviation * deviation;
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        access.store(deviations + j + v * kWidth<A>, deviation_sum[v]);
        access.store(squares + j + v * kWidth<A>, square_sum[v]);
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
template <typename T, typename A, typename Gradient>
BAGUA_SYNCBN_IN_LOOPS void grad_sums_columns_of(const T* dy, const T* x, const A* mean, int64_t rows, int64_t channels,
                                                A* columns, double* out, const Gradient& gradient) {
  A* const dy_sums = columns;
  A* const dy_xmu_sums = columns + channels;
  const int64_t ahead = group_ahead(channels);
  for (int64_t c = 0; c < 2 * channels; ++c) columns[c] = 0;
  // Called instead, it would take a tenth longer.
  for_each_group(rows, [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for_each_block<A>(channels, [&](auto width, int64_t j, auto access) {
      constexpr int kVectors = decltype(width)::value;
      Vec<A> means[kVectors], sum_dy[kVectors], sum_dy_xmu[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        means[v] = access.load(mean + j + v * kWidth<A>);
        sum_dy[v] = access.load(dy_sums + j + v * kWidth<A>);
        sum_dy_xmu[v] = access.load(dy_xmu_sums + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
        const int64_t start = row * channels;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t offset = start + j + v * kWidth<A>;
          prefetch(dy + offset + ahead);
          prefetch(x + offset + ahead);
          const Vec<A> value = access.load(x + offset);
          const Vec<A> grad = gradient(access.load(dy + offset), value, offset, j + v * kWidth<A>, access);
          sum_dy[v] += grad;
          sum_dy_xmu[v] += grad * (value - means[v]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        access.store(dy_sums + j + v * kWidth<A>, sum_dy[v]);
        access.store(dy_xmu_sums + j + v * kWidth<A>, sum_dy_xmu[v]);
      }
    });
  });
  for (int64_t c = 0; c < 2 * channels; ++c) out[c] = columns[c];
}
