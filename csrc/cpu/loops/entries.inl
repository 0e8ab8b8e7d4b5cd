// The loops of ../loops.h.

template <typename T, typename A = Accumulate<T>>
GradSums grad_sums(const Gradients<T>& of, int64_t rows, int64_t n, int64_t stride, int64_t channel) {
  const T* added = of.dy;
  if (!of.is_given()) {
    if (const auto sums = kFunctions<false, T, A>[of.epilogue.act.code].sums) return sums(of, rows, n, stride, channel);
    act_grad_lines<false>(of, rows, n, stride, channel);
    added = of.g;
  }
  return grad_sums_of<A>(added, of.x, of.factors.mean[channel], rows, n, stride, AsGiven());
}

template <typename T, typename A = Accumulate<T>>
void grad_sums_columns(const Gradients<T>& of, int64_t rows, int64_t channels, A* columns, double* out) {
  const T* added = of.dy;
  if (!of.is_given()) {
    if (const auto sums = kFunctions<true, T, A>[of.epilogue.act.code].sums) {
      return sums(of, rows, channels, columns, out);
    }
    act_grad_lines<true>(of, rows, channels, channels, 0);
    added = of.g;
  }
  grad_sums_columns_of(added, of.x, of.factors.mean, rows, channels, columns, out, AsGiven());
}

// Calls body(stream), with whether to write with streaming stores as a type.
template <typename Body>
BAGUA_SYNCBN_IN_LOOPS void streaming(bool stream, const Body& body) {
  if (!stream) return body(std::false_type());
  body(std::true_type());
  end_streaming();
}

template <typename T, typename A = Accumulate<T>>
void normalize_rows(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    const NormalizeFactors<A>& factors, const Epilogue<T>& epilogue) {
  if (!epilogue.is_none()) return act_lines<false>(x, y, rows, n, channel, channels, factors, epilogue);
  streaming(factors.stream, [&](auto stream) {
    normalize_lines<Identity, stream, false, T>(x, nullptr, y, rows, n, channel, channels, factors, A(0));
  });
}

template <typename T, typename A = Accumulate<T>>
void normalize_columns(const T* x, T* y, int64_t rows, int64_t channels, const NormalizeFactors<A>& factors,
                       const Epilogue<T>& epilogue) {
  if (!epilogue.is_none()) return act_lines<true>(x, y, rows, channels, 0, channels, factors, epilogue);
  streaming(factors.stream, [&](auto stream) {
    normalize_lines<Identity, stream, true, T>(x, nullptr, y, rows, channels, 0, channels, factors, A(0));
  });
}

template <typename T, typename A = Accumulate<T>>
void grad_rows(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t n, int64_t channel,
               int64_t channels, const GradientFactors<A>& factors, const Act<A>& act) {
  if (valid != nullptr) {
    return gradient_lines<Identity, false, false>(dy, x, dx, AtPositions<A>(valid), rows, n, channel, channels, factors,
                                                  A(0));
  }
  const auto gradient = kFunctions<false, T, A>[act.code].gradients[factors.stream];
  gradient(dy, x, dx, rows, n, channel, channels, factors, act.parameter);
  if (factors.stream) end_streaming();
}

template <typename T, typename A = Accumulate<T>>
void grad_columns(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t channels,
                  const GradientFactors<A>& factors, const Act<A>& act) {
  if (act.code == 0) {
    return streaming(factors.stream, [&](auto stream) {
      gradient_lines<Identity, stream, true>(dy, x, dx, AtRows<A>(valid), rows, channels, 0, channels, factors, A(0));
    });
  }
  const auto gradient = kFunctions<true, T, A>[act.code].gradients[factors.stream];
  gradient(dy, x, dx, rows, channels, 0, channels, factors, act.parameter);
  if (factors.stream) end_streaming();
}
