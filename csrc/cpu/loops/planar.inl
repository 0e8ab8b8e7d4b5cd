// Planar reductions: sums over rows of one channel.

// Vectors that are summed separately.
constexpr int kVectors = kBytes == 64 ? 4 : 8;

// Calls body(v, offset, access) for each vector of a row of n values; v is the sum that it belongs to. The last vector
// may be partial.
template <typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_vector(int64_t n, const Body& body) {
  int64_t j = 0;
  for (; j + kVectors * kWidth<A> <= n; j += kVectors * kWidth<A>) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) body(v, j + v * kWidth<A>, Whole());
  }
#pragma GCC unroll 8
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

// A running sum.
template <typename A>
struct Lanes {
  Vec<A> part[kVectors] = {};

  // Adds the vectors, then their lanes in double.
  double total() {
#pragma GCC unroll 4
    for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
      for (int v = 0; v < half; ++v) part[v] += part[half + v];
    }
    double sum = 0;
    for (int lane = 0; lane < kWidth<A>; ++lane) sum += part[0][lane];
    return sum;
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
  const Vec<A> pivots = of<Vec<A>>(pivot);

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
Pair grad_sums(const Gradients<T>& arguments, int64_t rows, int64_t n, int64_t stride, int64_t channel) {
  const GradientOf<Activation, false, T> gradient(arguments, channel);
  const Vec<A> means = of<Vec<A>>(arguments.factors.mean[channel]);
  const T *dy = arguments.dy, *x = arguments.x;
  const Ahead next(n, stride);
  Lanes<A> sum_dy, sum_dy_xmu;
  for (int64_t row = 0; row < rows; ++row, x += stride, dy += stride) {
    for_each_vector<A>(n, [&](int v, int64_t j, const auto& access) {
      access.fetch(dy + next(j));
      access.fetch(x + next(j));
      const Vec<A> value = access.load(x + j), grad = gradient(access.load(dy + j), value, row * stride + j, 0, access);
      sum_dy.part[v] += grad;
      sum_dy_xmu.part[v] += grad * (value - means);
    });
  }
  return {sum_dy.total(), sum_dy_xmu.total()};
}
