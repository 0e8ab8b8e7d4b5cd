// Planar reductions: sums over rows of one channel.

// Calls body(v, offset, access) for each vector of a row of n values. The last vector may be partial. Vector v has the
// lanes starting at v * kWidth.
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

// A running sum in kLanes lanes.
template <typename A>
struct Lanes {
  static constexpr int kVectors = kLanes / kWidth<A>;
  Vec<A> part[kVectors] = {};

  // Repeatedly adds the upper half to the lower half, in the same order for all vector widths: to 16 lanes in A, then
  // in double.
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

// Maps a position in a row to the position to prefetch, kAhead values later in this row or the next.
struct Ahead {
  int64_t distance, n, to_next_row;
  Ahead(int64_t n, int64_t stride) : distance(n < kAhead ? n : kAhead), n(n), to_next_row(stride - n) {}

  int64_t operator()(int64_t j) const {
    const int64_t target = j + distance;
    return target < n ? target : target + to_next_row;
  }
};

// Sums deviations from a pivot. If the pivot is the mean of 1/64 of the values, rounding errors grow by a factor of at
// most 64, for any values.
template <bool kMasked, typename T, typename A = Accumulate<T>>
BAGUA_SYNCBN_IN_LOOPS Pair moments_of(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride,
                                      const Sample& sample, int64_t count) {
  Lanes<A> first;
  for (int64_t row = 0; row < sample.rows; ++row) {
    for_each_vector<A>(sample.n, [&](int v, int64_t j, const auto& access) {
      first.part[v] += access.template counted<kMasked, A>(valid + row * n + j, access.load(x + row * stride + j));
    });
  }
  const A pivot = static_cast<A>(first.total() / sample.count);
  const Vec<A> pivots = broadcast<A>(pivot);

  const Ahead next(n, stride);
  Lanes<A> deviations, squares;
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    for_each_vector<A>(n, [&](int v, int64_t j, const auto& access) {
      access.fetch(x + next(j));
      const Vec<A> difference = access.template only<A>(access.load(x + j) - pivots);
      const Vec<A> deviation = access.template counted<kMasked, A>(valid + row * n + j, difference);
      deviations.part[v] += deviation;
      squares.part[v] += deviation * deviation;
    });
  }
  const double number = static_cast<double>(count);
  const double shift = deviations.total() / number;
  const double m2 = squares.total() - shift * shift * number;
  return {pivot + shift, m2 < 0 ? 0 : m2};
}

template <typename T>
Pair moments(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, const Sample& sample,
             int64_t count) {
  if (valid == nullptr) return moments_of<false>(x, valid, rows, n, stride, sample, count);
  return moments_of<true>(x, valid, rows, n, stride, sample, count);
}

template <typename Activation, typename T, typename A = Accumulate<T>>
Pair grad_sums(const Gradients<T>& of, int64_t rows, int64_t n, int64_t stride, int64_t channel) {
  const GradientOf<Activation, false, T> gradient(of, channel);
  const Vec<A> means = broadcast<A>(of.factors.mean[channel]);
  const T *dy = of.dy, *x = of.x;
  const Ahead next(n, stride);
  Lanes<A> sum_dy, sum_dy_xmu;
  for (int64_t row = 0; row < rows; ++row, x += stride, dy += stride) {
    for_each_vector<A>(n, [&](int v, int64_t j, const auto& access) {
      access.fetch(dy + next(j));
      access.fetch(x + next(j));
      const Vec<A> value = access.load(x + j), grad = gradient(access.load(dy + j), value, row * stride + j, 0, access);
      // dy is 0 beyond the row, but times an infinite mean it would be NaN.
      const Vec<A> deviation = access.template only<A>(value - means);
      sum_dy.part[v] += grad;
      sum_dy_xmu.part[v] += grad * deviation;
    });
  }
  return {sum_dy.total(), sum_dy_xmu.total()};
}
