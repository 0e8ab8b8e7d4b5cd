// Planar: sums over rows of values of one channel.

// Calls body(v, offset, access) for each vector of the n values of a row, v being the place of its lanes among the
// kLanes; the last one may be a part.
template <typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_vector(int64_t n, const Body& body) {
  constexpr int kVectors = kLanes / kWidth<A>;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) body(v, j + v * kWidth<A>, Whole());
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    if (j + kWidth<A> <= n) {
      body(v, j, Whole());
      j += kWidth<A>;
    } else {
      if (j < n) body(v, j, Part{n - j});
      return;
    }
  }
}

// The kLanes lanes of a sum.
template <typename A>
struct Lanes {
  static constexpr int kVectors = kLanes / kWidth<A>;
  Vec<A> part[kVectors] = {};

  // Adds halves to halves, which vectors of any width do in the same order: down to 16 lanes in A, then in double.
  double total() const {
    constexpr int kLast = 16 / kWidth<A> > 0 ? 16 / kWidth<A> : 1;
    Vec<A> folded[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) folded[v] = part[v];
#pragma GCC unroll 4
    for (int half = kVectors / 2; half >= kLast; half /= 2) {
#pragma GCC unroll 16
      for (int v = 0; v < half; ++v) folded[v] += folded[half + v];
    }
    double sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = folded[i / kWidth<A>][i % kWidth<A>];
#pragma GCC unroll 4
    for (int half = 8; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    return sums[0];
  }
};

// Where to prefetch while the values at j of a row of n are added up: kAhead values further, in this row or the next.
struct Ahead {
  int64_t distance, n, to_next_row;
  Ahead(int64_t n, int64_t stride) : distance(n < kAhead ? n : kAhead), n(n), to_next_row(stride - n) {}

  int64_t operator()(int64_t j) const {
    const int64_t target = j + distance;
    return target < n ? target : target + to_next_row;
  }
};

// Sums of deviations from a value near the mean, which need no correction but for how near it is: with the mean of a
// 64th of the values, rounding can grow by a factor of 64 at the very worst, whatever the values are. That many,
// `sampled`, are among the first `sample` of the first row.
template <typename A, typename Where, typename T>
BAGUA_SYNCBN_IN_LOOPS Moments moments_of(const T* x, const Where& where, int64_t rows, int64_t n, int64_t stride,
                                         int64_t sample, int64_t sampled, int64_t count) {
  Lanes<A> first;
  for_each_vector<A>(n < sample ? n : sample, [&](int v, int64_t j, const auto& access) {
    first.part[v] += where.counted(access, access.load(x + j), j);
  });
  const A pivot = static_cast<A>(first.total() / sampled);
  const Vec<A> pivots = broadcast<A>(pivot);

  const Ahead next(n, stride);
  Lanes<A> deviations, squares;
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    for_each_vector<A>(n, [&](int v, int64_t j, const auto& access) {
      access.fetch(x + next(j));
      const Vec<A> difference = access.template only<A>(access.load(x + j) - pivots);
      const Vec<A> deviation = where.counted(access, difference, row * n + j);
      deviations.part[v] += deviation;
      squares.part[v] += deviation * deviation;
    });
  }
  const double number = static_cast<double>(count);
  const double shift = deviations.total() / number;
  const double m2 = squares.total() - shift * shift * number;
  return {pivot + shift, m2 < 0 ? 0 : m2};
}

template <typename T, typename A = Accumulate<T>>
Moments moments(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, int64_t sampled,
                int64_t count) {
  if (valid == nullptr) return moments_of<A>(x, Everywhere<A>(), rows, n, stride, kSample, sampled, count);
  return moments_of<A>(x, AtPositions<A>(valid), rows, n, stride, kMaskedSample, sampled, count);
}

// The gradients that are added up: dy itself.
struct AsGiven {
  template <typename V, typename Access>
  V operator()(V dy, V, int64_t, int64_t, const Access&) const {
    return dy;
  }
};

// `gradient(dy, x, offset, column, access)` makes what is added up, of values at `offset` from the first.
template <typename A, typename T, typename Gradient>
BAGUA_SYNCBN_IN_LOOPS GradSums grad_sums_of(const T* dy, const T* x, A mean, int64_t rows, int64_t n, int64_t stride,
                                            const Gradient& gradient) {
  const Vec<A> means = broadcast<A>(mean);
  const Ahead next(n, stride);
  Lanes<A> sum_dy, sum_dy_xmu;
  for (int64_t row = 0; row < rows; ++row, x += stride, dy += stride) {
    for_each_vector<A>(n, [&](int v, int64_t j, const auto& access) {
      access.fetch(dy + next(j));
      access.fetch(x + next(j));
      const Vec<A> value = access.load(x + j), grad = gradient(access.load(dy + j), value, row * stride + j, 0, access);
      // dy is 0 beyond the row, but an infinite mean would make that a NaN.
      const Vec<A> deviation = access.template only<A>(value - means);
      sum_dy.part[v] += grad;
      sum_dy_xmu.part[v] += grad * deviation;
    });
  }
  return {sum_dy.total(), sum_dy_xmu.total()};
}
