// Passes that write a value for each: rows of n values in memory one after another. Each row is of the next channel, or
// has one value for each channel.

// The vectors of a row: body(j, access) for each; the last one may be a part. Row by row: going down a block of columns
// would read and write memory in pieces, at half the speed.
template <typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_column(int64_t n, const Body& body) {
  int64_t j = 0;
#pragma GCC unroll 4
  for (; j + kWidth<A> <= n; j += kWidth<A>) body(j, Whole());
  if (j < n) body(j, Part{n - j});
}

// A factor of each channel: one for a row, or one for each column from `first` on.
template <bool kColumns, typename A>
struct Factor {
  const A* all;
  Vec<A> one;
  Factor(const A* all, int64_t first) : all(all + first), one(broadcast(all[first])) {}

  template <typename Access>
  BAGUA_SYNCBN_IN_LOOPS Vec<A> at(int64_t column, const Access& access) const {
    if constexpr (kColumns) return access.load(all + column);
    return one;
  }
};

// z of values of a row from `first` on.
template <bool kColumns, typename A>
struct Normalize {
  Factor<kColumns, A> mean, scale, shift;
  Normalize(const NormalizeFactors<A>& factors, int64_t first)
      : mean(factors.mean, first), scale(factors.scale, first), shift(factors.shift, first) {}

  template <typename Access>
  BAGUA_SYNCBN_IN_LOOPS Vec<A> operator()(Vec<A> x, int64_t column, const Access& access) const {
    return (x - mean.at(column, access)) * scale.at(column, access) + shift.at(column, access);
  }
};

// Calls body(j, z, access) for each vector of a row, with what is to be activated; `residual` may be null.
template <bool kColumns, typename T, typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_normalized(const T* x, const T* residual, int64_t n,
                                               const NormalizeFactors<A>& factors, int64_t first, const Body& body) {
  const Normalize<kColumns, A> normalized(factors, first);
  for_each_column<A>(n, [&](int64_t j, const auto& access) {
    access.fetch(x + j + kAhead);
    const Vec<A> z = normalized(access.load(x + j), j, access);
    if (residual == nullptr) return body(j, z, access);
    access.fetch(residual + j + kAhead);
    body(j, z + access.load(residual + j), access);
  });
}

// y = act(z).
template <typename Activation, bool kStream, bool kColumns, typename T, typename A>
BAGUA_SYNCBN_IN_LOOPS void normalize_lines(const T* x, const T* residual, T* y, int64_t rows, int64_t n,
                                           int64_t channel, int64_t channels, const NormalizeFactors<A>& factors,
                                           A parameter) {
  const Vec<A> p = broadcast(parameter);
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    const T* added = residual == nullptr ? nullptr : residual + row * n;
    for_each_normalized<kColumns>(x, added, n, factors, kColumns ? 0 : channel,
                                  [&](int64_t j, Vec<A> z, const auto& access) {
                                    access.template store<kStream>(y + j, Activation::value(z, p));
                                  });
    if (++channel == channels) channel = 0;
  }
}

// dx of g = dy * act'(z). Where a value does not count, g * scale.
template <typename Activation, bool kStream, bool kColumns, typename Where, typename T, typename A>
BAGUA_SYNCBN_IN_LOOPS void gradient_lines(const T* dy, const T* x, T* dx, const Where& where, int64_t rows, int64_t n,
                                          int64_t channel, int64_t channels, const GradientFactors<A>& factors,
                                          A parameter) {
  constexpr bool kActivated = !std::is_same_v<Activation, Identity>;
  const Vec<A> p = broadcast(parameter);
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
    const int64_t first = kColumns ? 0 : channel;
    const Factor<kColumns, A> mean(factors.mean, first), mean_dy(factors.mean_dy, first),
        projection(factors.projection, first), scale(factors.scale, first), shift(factors.shift, first);
    if (where.skips(row)) {
      for_each_column<A>(n, [&](int64_t j, const auto& access) {
        access.template store<kStream>(dx + j, access.load(dy + j) * scale.at(j, access));
      });
    } else {
      for_each_column<A>(n, [&](int64_t j, const auto& access) {
        access.fetch(dy + j + kAhead);
        access.fetch(x + j + kAhead);
        const Vec<A> deviation = access.load(x + j) - mean.at(j, access), scaled = scale.at(j, access);
        Vec<A> g = access.load(dy + j);
        if constexpr (kActivated) g = g * Activation::derivative(deviation * scaled + shift.at(j, access), p);
        const Vec<A> projected = where.counted(access, deviation * projection.at(j, access), j);
        const Vec<A> centered = g - where.counted(access, mean_dy.at(j, access), j);
        access.template store<kStream>(dx + j, (centered - projected) * scaled);
      });
    }
    if (++channel == channels) channel = 0;
  }
}
