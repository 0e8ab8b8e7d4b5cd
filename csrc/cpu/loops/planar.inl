// Planar: rows of values of one channel.

// Calls body(v, offset) for each vector of the n values of a row, v being the place of its lanes among the kLanes, and
// tail(v, offset, count) for the last count < kWidth values.
template <typename A, typename Body, typename Tail>
inline __attribute__((always_inline)) void for_each_vector(int64_t n, const Body& body, const Tail& tail) {
  constexpr int kVectors = kLanes / kWidth<A>;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) body(v, j + v * kWidth<A>);
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    if (j + kWidth<A> <= n) {
      body(v, j);
      j += kWidth<A>;
    } else {
      if (j < n) tail(v, j, n - j);
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
// 64th of the values, rounding can grow by a factor of 64 at the very worst, whatever the values are.
template <typename T>
Moments moments(const T* x, int64_t rows, int64_t n, int64_t stride) {
  using A = Accumulate<T>;
  const int64_t sampled = n < kSample ? n : kSample;
  Lanes<A> sample;
  for_each_vector<A>(
      sampled, [&](int v, int64_t j) { sample.part[v] += widen(x + j); },
      [&](int v, int64_t j, int64_t count) { sample.part[v] += widen_part(x + j, count); });
  const A pivot = static_cast<A>(sample.total() / sampled);
  const Vec<A> pivots = broadcast<A>(pivot);

  const Ahead next(n, stride);
  Lanes<A> deviations, squares;
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    for_each_vector<A>(
        n,
        [&](int v, int64_t j) {
          prefetch(x + next(j));
          const Vec<A> deviation = widen(x + j) - pivots;
          deviations.part[v] += deviation;
          squares.part[v] += deviation * deviation;
        },
        [&](int v, int64_t j, int64_t count) {
          const Vec<A> deviation = keep<A>(lanes_below<A>(count), widen_part(x + j, count) - pivots);
          deviations.part[v] += deviation;
          squares.part[v] += deviation * deviation;
        });
  }
  const double count = static_cast<double>(rows * n);
  const double shift = deviations.total() / count;
  const double m2 = squares.total() - shift * shift * count;
  return {pivot + shift, m2 < 0 ? 0 : m2};
}

// The gradients that are added up: dy itself.
struct AsGiven {
  template <typename V, typename Load, typename Store>
  V operator()(V dy, V, int64_t, int64_t, const Load&, const Store&) const {
    return dy;
  }
};

// `gradient(dy, x, offset, column, load, store)` makes what is added up, of values at `offset` from the first.
template <typename T, typename A, typename Gradient>
inline __attribute__((always_inline)) GradSums grad_sums_of(const T* dy, const T* x, A mean, int64_t rows, int64_t n,
                                                            int64_t stride, const Gradient& gradient) {
  const auto load = [](const auto* p) { return widen(p); };
  const auto store = [](auto* p, Vec<A> v) { narrow(p, v); };
  const Vec<A> means = broadcast<A>(mean);
  const Ahead next(n, stride);
  Lanes<A> sum_dy, sum_dy_xmu;
  for (int64_t row = 0; row < rows; ++row, x += stride, dy += stride) {
    for_each_vector<A>(
        n,
        [&](int v, int64_t j) {
          prefetch(dy + next(j));
          prefetch(x + next(j));
          const Vec<A> value = widen(x + j);
          const Vec<A> grad = gradient(widen(dy + j), value, row * stride + j, 0, load, store);
          sum_dy.part[v] += grad;
          sum_dy_xmu.part[v] += grad * (value - means);
        },
        [&](int v, int64_t j, int64_t count) {
          const auto load_part = [=](const auto* p) { return widen_part(p, count); };
          const auto store_part = [=](auto* p, Vec<A> v) { narrow_part(p, v, count); };
          const Vec<A> value = widen_part(x + j, count);
          const Vec<A> grad = gradient(widen_part(dy + j, count), value, row * stride + j, 0, load_part, store_part);
          // dy is 0 beyond the row, but an infinite mean would make that a NaN.
          const Vec<A> deviation = keep<A>(lanes_below<A>(count), value - means);
          sum_dy.part[v] += grad;
          sum_dy_xmu.part[v] += grad * deviation;
        });
  }
  return {sum_dy.total(), sum_dy_xmu.total()};
}

template <typename T, typename A = Accumulate<T>>
GradSums grad_sums(const T* dy, const T* x, A mean, int64_t rows, int64_t n, int64_t stride) {
  return grad_sums_of(dy, x, mean, rows, n, stride, AsGiven());
}

template <bool kStream, typename T, typename A>
void normalize_rows_to(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                       const NormalizeFactors<A>& factors) {
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    const Vec<A> mean = broadcast<A>(factors.mean[channel]);
    const Vec<A> scale = broadcast<A>(factors.scale[channel]);
    const Vec<A> shift = broadcast<A>(factors.shift[channel]);
    for_each_vector<A>(
        n,
        [&](int, int64_t j) {
          prefetch(x + j + kAhead);
          narrow<kStream>(y + j, (widen(x + j) - mean) * scale + shift);
        },
        [&](int, int64_t j, int64_t count) {
          narrow_part(y + j, (widen_part(x + j, count) - mean) * scale + shift, count);
        });
    if (++channel == channels) channel = 0;
  }
}

template <typename T, typename A = Accumulate<T>>
void normalize_rows(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    NormalizeFactors<A> factors) {
  if (!factors.stream) return normalize_rows_to<false>(x, y, rows, n, channel, channels, factors);
  normalize_rows_to<true>(x, y, rows, n, channel, channels, factors);
  end_streaming();
}

template <bool kStream, typename T, typename A>
void grad_rows_to(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                  const GradientFactors<A>& factors) {
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
    const Vec<A> mean = broadcast<A>(factors.mean[channel]);
    const Vec<A> mean_dy = broadcast<A>(factors.mean_dy[channel]);
    const Vec<A> projection = broadcast<A>(factors.projection[channel]);
    const Vec<A> scale = broadcast<A>(factors.scale[channel]);
    for_each_vector<A>(
        n,
        [&](int, int64_t j) {
          prefetch(dy + j + kAhead);
          prefetch(x + j + kAhead);
          const Vec<A> projected = (widen(x + j) - mean) * projection;
          narrow<kStream>(dx + j, ((widen(dy + j) - mean_dy) - projected) * scale);
        },
        [&](int, int64_t j, int64_t count) {
          const Vec<A> projected = (widen_part(x + j, count) - mean) * projection;
          narrow_part(dx + j, ((widen_part(dy + j, count) - mean_dy) - projected) * scale, count);
        });
    if (++channel == channels) channel = 0;
  }
}

template <typename T, typename A = Accumulate<T>>
void grad_rows(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
               GradientFactors<A> factors) {
  if (!factors.stream) return grad_rows_to<false>(dy, x, dx, rows, n, channel, channels, factors);
  grad_rows_to<true>(dy, x, dx, rows, n, channel, channels, factors);
  end_streaming();
}
