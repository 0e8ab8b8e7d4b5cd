// Interleaved reductions: sums over rows with a value per channel.

// Vectors that are summed together, in registers: AVX-512 has 32 registers, AVX2 and the baseline 16.
constexpr int kVectorsAtOnce = kBytes == 64 ? 4 : 2;

// Calls body(width, j, access) for blocks of kVectorsAtOnce vectors of columns, then single vectors, then the rest.
// decltype(width)::value is the number of vectors.
template <typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_block(int64_t channels, const Body& body) {
  int64_t j = 0;
  for (; j + kVectorsAtOnce * kWidth<A> <= channels; j += kVectorsAtOnce * kWidth<A>)
    body(std::integral_constant<int, kVectorsAtOnce>(), j, Whole());
  for (; j + kWidth<A> <= channels; j += kWidth<A>) body(std::integral_constant<int, 1>(), j, Whole());
  if (j < channels) body(std::integral_constant<int, 1>(), j, Part{channels - j});
}

// Sums are loaded and stored once per kGroup rows. Groups are small, so that memory is read almost sequentially: long
// columns take 1.5 times as long.
constexpr int64_t kGroup = 8;

// Returns the prefetch distance.
inline int64_t group_ahead(int64_t channels) {
  return kGroup * channels > kAhead ? kGroup * channels : kAhead;
}

// Computes two sums per column, sums[2][channels]. term(first, second, center, row, column, access) adds a vector's
// terms to the two sums `first` and `second`. `center` is the vector's part of `centers`.
template <typename A, typename Term>
BAGUA_SYNCBN_IN_LOOPS void add_columns(int64_t rows, int64_t channels, const A* centers, A* sums, const Term& term) {
  for (int64_t c = 0; c < 2 * channels; ++c) sums[c] = 0;
  for (int64_t begin = 0; begin < rows; begin += kGroup) {
    const int64_t end = begin + kGroup < rows ? begin + kGroup : rows;
    // Takes 10% longer if not inlined.
    for_each_block<A>(channels, [&](auto width, int64_t j, auto access) __attribute__((always_inline)) {
      constexpr int kBlock = decltype(width)::value;
      Vec<A> center[kBlock], first[kBlock], second[kBlock];
#pragma GCC unroll 4
      for (int v = 0; v < kBlock; ++v) {
        center[v] = access.load(centers + j + v * kWidth<A>);
        first[v] = access.load(sums + j + v * kWidth<A>);
        second[v] = access.load(sums + channels + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < kBlock; ++v) term(first[v], second[v], center[v], row, j + v * kWidth<A>, access);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kBlock; ++v) {
        access.store(sums + j + v * kWidth<A>, first[v]);
        access.store(sums + channels + j + v * kWidth<A>, second[v]);
      }
    });
  }
}

// Each column has a pivot p. With d = x - p, the mean of n values is p + sum(d) / n, and m2 is
// sum(d^2) - sum(d)^2 / n. Cancellation in this difference is bounded: p is the mean of one group of rows, and a tile
// has at most 32 groups.
template <typename T, typename RowAt, typename A = Accumulate<T>>
BAGUA_SYNCBN_IN_LOOPS void moments_columns_of(const T* x, const RowAt& row_at, int64_t rows, int64_t channels,
                                              A* columns, double* out) {
  A *const pivots = columns, *const deviations = columns + channels, *const squares = columns + 2 * channels;
  const int64_t sampled = rows < kGroup ? rows : kGroup;
  for_each_block<A>(channels, [&](auto width, int64_t j, auto access) {
    for (int64_t column = j; column < j + width * kWidth<A>; column += kWidth<A>) {
      Vec<A> sum = {};
      for (int64_t row = 0; row < sampled; ++row) sum += access.load(x + row_at(row) * channels + column);
      access.store(pivots + column, sum / static_cast<A>(sampled));
    }
  });
  const int64_t ahead = group_ahead(channels);
  add_columns(rows, channels, pivots, deviations,
              [&](Vec<A>& sum, Vec<A>& square_sum, Vec<A> pivot, int64_t row, int64_t column, const auto& access) {
                const T* p = x + row_at(row) * channels + column;
                access.fetch(p + ahead);
                const Vec<A> deviation = access.load(p) - pivot;
                sum += deviation;
                square_sum += deviation * deviation;
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

template <typename Activation, typename T, typename A = Accumulate<T>>
void grad_sums_columns(const Gradients<T>& arguments, int64_t rows, int64_t channels, A* columns, double* out) {
  const GradientOf<Activation, true, T> gradient(arguments, 0);
  const int64_t ahead = group_ahead(channels);
  add_columns(rows, channels, arguments.factors.mean, columns,
              [&](Vec<A>& sum_dy, Vec<A>& sum_dy_xmu, Vec<A> mean, int64_t row, int64_t column, const auto& access) {
                const int64_t offset = row * channels + column;
                access.fetch(arguments.dy + offset + ahead);
                access.fetch(arguments.x + offset + ahead);
                const Vec<A> value = access.load(arguments.x + offset);
                const Vec<A> grad = gradient(access.load(arguments.dy + offset), value, offset, column, access);
                sum_dy += grad;
                sum_dy_xmu += grad * (value - mean);
              });
  for (int64_t c = 0; c < 2 * channels; ++c) out[c] = columns[c];
}
