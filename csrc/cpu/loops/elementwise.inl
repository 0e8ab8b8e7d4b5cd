// Elementwise passes: y = act(z), and the gradient of the input.

// Calls body(j, access) for each vector of a row. The last vector may be partial. Blocks of columns would be half as
// fast, because they access memory in pieces.
template <typename A, typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_column(int64_t n, const Body& body) {
  int64_t j = 0;
#pragma GCC unroll 2
  for (; j + kWidth<A> <= n; j += kWidth<A>) body(j, Whole());
  if (j < n) body(j, Part{n - j});
}

// Calls body(row, channel) for each row. `stream`: whether body uses streaming stores.
template <typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_row(Rows rows, bool stream, const Body& body) {
  for (int64_t row = 0; row < rows.count; ++row) {
    body(row, rows.channel);
    if (++rows.channel == rows.channels) rows.channel = 0;
  }
  if (stream) end_streaming();
}

// A per-channel factor: one for a whole row, or one per column.
template <bool kColumns, typename A>
struct Factor {
  const A* all;
  Vec<A> one;
  Factor(const A* all, int64_t channel) : all(all), one(of<Vec<A>>(all[kColumns ? 0 : channel])) {}

  template <typename Access>
  BAGUA_SYNCBN_IN_LOOPS Vec<A> at(int64_t column, const Access& access) const {
    if constexpr (kColumns) return access.load(all + column);
    return one;
  }
};

// z without the residual, for values of a row.
template <bool kColumns, typename A>
struct Normalize {
  Factor<kColumns, A> mean, scale, shift;
  Normalize(const NormalizeFactors<A>& factors, int64_t channel)
      : mean(factors.mean, channel), scale(factors.scale, channel), shift(factors.shift, channel) {}

  template <typename Access>
  BAGUA_SYNCBN_IN_LOOPS Vec<A> operator()(Vec<A> x, int64_t column, const Access& access) const {
    return (x - mean.at(column, access)) * scale.at(column, access) + shift.at(column, access);
  }
};

// `residual` may be null.
template <typename Activation, bool kColumns, typename T, typename A = Accumulate<T>>
void normalize(const T* x, const T* residual, T* y, Rows rows, const NormalizeFactors<A>& factors) {
  const Vec<A> p = of<Vec<A>>(factors.parameter);
  const int64_t n = rows.n;
  const bool stream = factors.stream;
  for_each_row(rows, stream, [&](int64_t row, int64_t channel) __attribute__((always_inline)) {
    const Normalize<kColumns, A> normalized(factors, channel);
    const int64_t start = row * n;
    for_each_column<A>(n, [&](int64_t j, const auto& access) {
      access.fetch(x + start + j + kAhead);
      Vec<A> z = normalized(access.load(x + start + j), j, access);
      if (residual != nullptr) {
        access.fetch(residual + start + j + kAhead);
        z += access.load(residual + start + j);
      }
      access.store(y + start + j, Activation::value(z, p), stream);
    });
  });
}

template <typename Activation, bool kColumns, bool kMasked, typename T, typename A>
BAGUA_SYNCBN_IN_LOOPS void gradient_rows(const T* dy, const T* x, T* dx, const uint8_t* valid, Rows rows,
                                         const GradientFactors<A>& factors) {
  constexpr bool kMaskedLanes = kMasked && !kColumns, kMaskedRows = kMasked && kColumns;
  const Vec<A> p = of<Vec<A>>(factors.parameter);
  const int64_t n = rows.n;
  const bool stream = factors.stream;
  for_each_row(rows, stream, [&](int64_t row, int64_t channel) __attribute__((always_inline)) {
    const Normalize<kColumns, A> normalized(factors, channel);
    const Factor<kColumns, A> mean_dy(factors.mean_dy, channel), projection(factors.projection, channel);
    const int64_t start = row * n;
    if (kMaskedRows && !valid[row]) {
      for_each_column<A>(n, [&](int64_t j, const auto& access) {
        const Vec<A> dx_of_row = access.load(dy + start + j) * normalized.scale.at(j, access);
        access.store(dx + start + j, dx_of_row, stream);
      });
      return;
    }
    for_each_column<A>(n, [&](int64_t j, const auto& access) {
      access.fetch(dy + start + j + kAhead);
      access.fetch(x + start + j + kAhead);
      const Vec<A> value = access.load(x + start + j), deviation = value - normalized.mean.at(j, access);
      const Vec<A> g = access.load(dy + start + j) * Activation::derivative(normalized(value, j, access), p);
      const Vec<A> projected =
          access.template counted<kMaskedLanes, A>(valid + j, deviation * projection.at(j, access));
      const Vec<A> centered = g - access.template counted<kMaskedLanes, A>(valid + j, mean_dy.at(j, access));
      access.store(dx + start + j, (centered - projected) * normalized.scale.at(j, access), stream);
    });
  });
}

template <typename Activation, bool kColumns, typename T, typename A = Accumulate<T>>
void gradient(const T* dy, const T* x, T* dx, const uint8_t* valid, Rows rows, const GradientFactors<A>& factors) {
  if constexpr (std::is_same_v<Activation, Identity>) {
    if (valid != nullptr) return gradient_rows<Identity, kColumns, true>(dy, x, dx, valid, rows, factors);
  }
  gradient_rows<Activation, kColumns, false>(dy, x, dx, valid, rows, factors);
}

// Computes g at `offset`, and writes it unless the buffer is null.
template <typename Activation, bool kColumns, typename T, typename A = Accumulate<T>>
struct GradientOf {
  const T* residual;
  T* g;
  Normalize<kColumns, A> normalized;
  Vec<A> p;
  GradientOf(const Gradients<T>& arguments, int64_t channel)
      : residual(arguments.residual),
        g(arguments.g),
        normalized(arguments.factors, channel),
        p(of<Vec<A>>(arguments.factors.parameter)) {}

  template <typename Access>
  BAGUA_SYNCBN_IN_LOOPS Vec<A> operator()(Vec<A> dy, Vec<A> x, int64_t offset, int64_t column,
                                          const Access& access) const {
    if constexpr (std::is_same_v<Activation, Identity>) return dy;
    Vec<A> z = normalized(x, column, access);
    if (residual != nullptr) z += access.load(residual + offset);
    const Vec<A> gradient = dy * Activation::derivative(z, p);
    if (g != nullptr) access.store(g + offset, gradient);
    return gradient;
  }
};
