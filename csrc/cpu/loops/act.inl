// Loops with an activation of z = (x - mean) * scale + shift + residual. Those of a few operations are computed where z
// is, and of floats the ones that are met most, so that memory and arithmetic work at the same time. For all others a
// chunk of values at a time, which stays in the L1 cache, goes through a loop that is compiled once for each
// activation, and not once more for each dtype and layout. Chunks are short, since memory waits meanwhile.

constexpr int64_t kChunk = 128;

// Room for the last vector of a row that ends within it.
template <typename A>
struct alignas(64) Chunk {
  A values[kChunk + kWidth<A>] = {};
};

template <typename A>
using Element = std::conditional_t<std::is_same_v<A, float>, Vec<float>, double>;

// Sets the n values at z to the activation there, or to its derivative; also those that share a vector with the last.
template <typename Activation, bool kDerivative, typename A>
void activate(A* z, int64_t n, A parameter) {
  using V = Element<A>;
  const V p = V{} + parameter;
  for (int64_t j = 0; j < n; j += sizeof(V) / sizeof(A)) {
    const V v = load_bytes<V>(z + j);
    const V result = kDerivative ? Activation::derivative(v, p) : Activation::value(v, p);
    __builtin_memcpy(z + j, &result, sizeof(V));
  }
}

// A factor of each channel: one for a row, or one for each column from `first` on.
template <bool kColumns, typename A>
struct Factor {
  const A* all;
  Vec<A> one;
  Factor(const A* all, int64_t first) : all(all + first), one(broadcast(all[first])) {}

  template <typename Load>
  inline __attribute__((always_inline)) Vec<A> at(int64_t column, const Load& load) const {
    if constexpr (kColumns) return load(all + column);
    return one;
  }
};

template <bool kColumns, typename A>
struct Normalize {
  Factor<kColumns, A> mean, scale, shift;
  Normalize(const NormalizeFactors<A>& factors, int64_t first)
      : mean(factors.mean, first), scale(factors.scale, first), shift(factors.shift, first) {}

  template <typename Load>
  inline __attribute__((always_inline)) Vec<A> operator()(Vec<A> x, int64_t column, const Load& load) const {
    return (x - mean.at(column, load)) * scale.at(column, load) + shift.at(column, load);
  }
};

// What to activate, of n values of a row from `offset` on; `residual` may be null.
template <bool kColumns, typename T, typename A>
struct Line {
  const T* x;
  const T* residual;
  int64_t n;
  Normalize<kColumns, A> normalized;

  Line(const T* x, const T* residual, int64_t offset, int64_t n, const NormalizeFactors<A>& factors, int64_t first)
      : x(x + offset), residual(residual ? residual + offset : nullptr), n(n), normalized(factors, first) {}

  template <typename Load>
  inline __attribute__((always_inline)) Vec<A> at(int64_t j, const Load& load) const {
    const Vec<A> z = normalized(load(x + j), j, load);
    return residual == nullptr ? z : z + load(residual + j);
  }

  // Calls body(j, z) for each vector, and tail(j, z, count) for the last count values.
  template <typename Body, typename Tail>
  inline __attribute__((always_inline)) void for_each(const Body& body, const Tail& tail) const {
    for_each_column<A>(
        n,
        [&](int64_t j) {
          prefetch(x + j + kAhead);
          if (residual != nullptr) prefetch(residual + j + kAhead);
          body(j, at(j, [](const auto* p) { return widen(p); }));
        },
        [&](int64_t j, int64_t count) { tail(j, at(j, [=](const auto* p) { return widen_part(p, count); }), count); });
  }

  // Where n is not a number of whole vectors, what is behind the last value changes too.
  void write_to(A* chunk) const {
    for_each([&](int64_t j, Vec<A> z) { narrow(chunk + j, z); },
             [&](int64_t j, Vec<A> z, int64_t) { narrow(chunk + j, z); });
  }
};

template <typename Activation, typename... Some>
constexpr bool kIsOneOf = (std::is_same_v<Activation, Some> || ...);

// What is_cheap of ../../activations.h says.
#define BAGUA_SYNCBN_CHEAP(name) || (std::is_same_v<Activation, name> && is_cheap(static_cast<int64_t>(Code::k##name)))
template <typename Activation>
constexpr bool kCheap = false BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CHEAP);
#undef BAGUA_SYNCBN_CHEAP

// Activations that are computed where z is.
template <typename Activation, typename A>
constexpr bool kDirect = kCheap<Activation> || std::is_same_v<Activation, Identity> ||
                         (std::is_same_v<A, float> && kIsOneOf<Activation, Silu, Gelu, Sigmoid>);

// Of rows of n values: each is of the next channel, or has one value for each channel.
template <typename Activation, bool kStream, bool kColumns, typename T, typename A>
void values_of_rows(const T* x, const T* residual, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    const NormalizeFactors<A>& factors, A parameter) {
  const Vec<A> p = broadcast(parameter);
  for (int64_t row = 0; row < rows; ++row, y += n) {
    Line<kColumns, T, A>(x, residual, row * n, n, factors, kColumns ? 0 : channel)
        .for_each([&](int64_t j, Vec<A> z) { narrow<kStream>(y + j, Activation::value(z, p)); },
                  [&](int64_t j, Vec<A> z, int64_t count) { narrow_part(y + j, Activation::value(z, p), count); });
    if (++channel == channels) channel = 0;
  }
}

// The functions of an activation: of rows if it is direct, of a chunk if not, and null for the other.
template <bool kColumns, typename T, typename A>
struct Functions {
  decltype(&values_of_rows<Identity, false, kColumns, T, A>) rows, streamed_rows;
  decltype(&activate<Identity, false, A>) values, derivatives;
};

template <typename Activation, bool kColumns, typename T, typename A>
constexpr Functions<kColumns, T, A> functions_of() {
  if constexpr (kDirect<Activation, A>) {
    return {values_of_rows<Activation, false, kColumns, T, A>, values_of_rows<Activation, true, kColumns, T, A>,
            nullptr, nullptr};
  } else {
    return {nullptr, nullptr, activate<Activation, false, A>, activate<Activation, true, A>};
  }
}

#define BAGUA_SYNCBN_FUNCTIONS(Activation) functions_of<Activation, kColumns, T, A>(),
template <bool kColumns, typename T, typename A>
constexpr Functions<kColumns, T, A> kFunctions[] = {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_FUNCTIONS)};
#undef BAGUA_SYNCBN_FUNCTIONS

template <bool kStream, typename T, typename A>
void write(const A* chunk, T* y, int64_t n) {
  for_each_column<A>(
      n, [&](int64_t j) { narrow<kStream>(y + j, load_bytes<Vec<A>>(chunk + j)); },
      [&](int64_t j, int64_t count) { narrow_part(y + j, load_bytes<Vec<A>>(chunk + j), count); });
}

template <typename T, typename A>
void write_gradient(const A* derivatives, const T* dy, T* g, int64_t n) {
  for_each_column<A>(
      n,
      [&](int64_t j) {
        prefetch(dy + j + kAhead);
        narrow(g + j, widen(dy + j) * load_bytes<Vec<A>>(derivatives + j));
      },
      [&](int64_t j, int64_t count) {
        narrow_part(g + j, widen_part(dy + j, count) * load_bytes<Vec<A>>(derivatives + j), count);
      });
}

// Calls body(row, rows, begin, count) for chunks of rows of n values: several whole rows, or a part of one.
template <typename Body>
inline __attribute__((always_inline)) void for_each_chunk(int64_t rows, int64_t n, const Body& body) {
  const int64_t at_once = n < kChunk ? kChunk / n : 1;
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t some = row + at_once < rows ? at_once : rows - row;
    for (int64_t begin = 0; begin < n; begin += kChunk) body(row, some, begin, n - begin < kChunk ? n - begin : kChunk);
  }
}

// Rows of n values that follow each other, as for values_of_rows.
template <bool kColumns, typename T, typename A>
inline void act_lines(const T* x, const T* residual, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                      const NormalizeFactors<A>& factors, Act<A> act) {
  const Functions<kColumns, T, A>& functions = kFunctions<kColumns, T, A>[act.code];
  if (const auto values = factors.stream ? functions.streamed_rows : functions.rows) {
    values(x, residual, y, rows, n, channel, channels, factors, act.parameter);
  } else {
    Chunk<A> chunk;
    for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
      const int64_t offset = row * n + begin;
      for (int64_t r = 0; r < some; ++r) {
        const int64_t first = kColumns ? begin : (channel + row + r) % channels;
        Line<kColumns, T, A>(x, residual, offset + r * n, count, factors, first).write_to(chunk.values + r * count);
      }
      functions.values(chunk.values, some * count, act.parameter);
      (factors.stream ? write<true, T, A> : write<false, T, A>)(chunk.values, y + offset, some * count);
    });
  }
  if (factors.stream) end_streaming();
}

// Writes g = dy * act'(z), of rows that are `stride` apart, of one channel or of one value for each channel.
template <bool kColumns, typename T, typename A>
inline void act_grad_lines(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t n, int64_t stride,
                           int64_t channel, const NormalizeFactors<A>& factors, Act<A> act) {
  Chunk<A> chunk;
  for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
    const int64_t offset = row * stride + begin;
    for (int64_t r = 0; r < some; ++r) {
      const Line<kColumns, T, A> line(x, residual, offset + r * stride, count, factors, kColumns ? begin : channel);
      line.write_to(chunk.values + r * count);
    }
    kFunctions<kColumns, T, A>[act.code].derivatives(chunk.values, some * count, act.parameter);
    for (int64_t r = 0; r < some; ++r) {
      write_gradient(chunk.values + r * count, dy + offset + r * stride, g + offset + r * stride, count);
    }
  });
}

// dy * act'(z), for grad_sums_of; also written to `g` unless that is null.
template <typename Activation, bool kColumns, typename T, typename A>
struct GradientOf {
  const T* residual;
  T* g;
  Normalize<kColumns, A> normalized;
  Vec<A> p;
  GradientOf(const T* residual, T* g, const NormalizeFactors<A>& factors, int64_t channel, A parameter)
      : residual(residual), g(g), normalized(factors, channel), p(broadcast(parameter)) {}

  template <typename Load, typename Store>
  inline __attribute__((always_inline)) Vec<A> operator()(Vec<A> dy, Vec<A> x, int64_t offset, int64_t column,
                                                          const Load& load, const Store& store) const {
    Vec<A> z = normalized(x, column, load);
    if (residual != nullptr) z += load(residual + offset);
    const Vec<A> gradient = dy * Activation::derivative(z, p);
    if (g != nullptr) store(g + offset, gradient);
    return gradient;
  }
};

template <typename Activation, typename T, typename A>
GradSums gradient_sums(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t n, int64_t stride,
                       int64_t channel, const NormalizeFactors<A>& factors, A parameter) {
  const GradientOf<Activation, false, T, A> gradient(residual, g, factors, channel, parameter);
  return grad_sums_of(dy, x, factors.mean[channel], rows, n, stride, gradient);
}

template <typename Activation, typename T, typename A>
void gradient_sums_columns(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t channels, A* columns,
                           double* out, const NormalizeFactors<A>& factors, A parameter) {
  const auto every = [](int64_t row) { return row; };
  const GradientOf<Activation, true, T, A> gradient(residual, g, factors, 0, parameter);
  grad_sums_columns_of(dy, x, factors.mean, every, rows, channels, columns, out, gradient);
}

// The gradient of the input, of rows as for values_of_rows.
template <typename Activation, bool kStream, bool kColumns, typename T, typename A>
void input_gradient(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    const GradientFactors<A>& factors, const A* shifts, A parameter) {
  const Vec<A> p = broadcast(parameter);
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
    const int64_t first = kColumns ? 0 : channel;
    const Factor<kColumns, A> mean(factors.mean, first), mean_dy(factors.mean_dy, first),
        projection(factors.projection, first), scale(factors.scale, first), shift(shifts, first);
    const auto gradient = [&](int64_t j, const auto& load) {
      const Vec<A> deviation = load(x + j) - mean.at(j, load), scaled = scale.at(j, load);
      const Vec<A> g = load(dy + j) * Activation::derivative(deviation * scaled + shift.at(j, load), p);
      return ((g - mean_dy.at(j, load)) - deviation * projection.at(j, load)) * scaled;
    };
    for_each_column<A>(
        n,
        [&](int64_t j) {
          prefetch(dy + j + kAhead);
          prefetch(x + j + kAhead);
          narrow<kStream>(dx + j, gradient(j, [](const auto* at) { return widen(at); }));
        },
        [&](int64_t j, int64_t count) {
          narrow_part(dx + j, gradient(j, [=](const auto* at) { return widen_part(at, count); }), count);
        });
    if (++channel == channels) channel = 0;
  }
}

// The functions of backward of an activation: sums if it is direct, gradients of the input if it is cheap, or null.
template <typename T, typename A>
struct BackwardFunctions {
  decltype(&gradient_sums<Identity, T, A>) sums;
  decltype(&gradient_sums_columns<Identity, T, A>) sums_columns;
  decltype(&input_gradient<Identity, false, false, T, A>) rows, streamed_rows, columns, streamed_columns;
};

template <typename Activation, typename T, typename A>
constexpr BackwardFunctions<T, A> backward_functions_of() {
  BackwardFunctions<T, A> functions = {};
  if constexpr (kDirect<Activation, A>) {
    functions.sums = gradient_sums<Activation, T, A>;
    functions.sums_columns = gradient_sums_columns<Activation, T, A>;
  }
  if constexpr (kCheap<Activation>) {
    functions.rows = input_gradient<Activation, false, false, T, A>;
    functions.streamed_rows = input_gradient<Activation, true, false, T, A>;
    functions.columns = input_gradient<Activation, false, true, T, A>;
    functions.streamed_columns = input_gradient<Activation, true, true, T, A>;
  }
  return functions;
}

#define BAGUA_SYNCBN_FUNCTIONS(Activation) backward_functions_of<Activation, T, A>(),
template <typename T, typename A>
constexpr BackwardFunctions<T, A> kBackward[] = {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_FUNCTIONS)};
#undef BAGUA_SYNCBN_FUNCTIONS

template <typename T, typename A = Accumulate<T>>
void act_rows(const T* x, const T* residual, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
              NormalizeFactors<A> factors, Act<A> act) {
  act_lines<false>(x, residual, y, rows, n, channel, channels, factors, act);
}

template <typename T, typename A = Accumulate<T>>
void act_columns(const T* x, const T* residual, T* y, int64_t rows, int64_t channels, NormalizeFactors<A> factors,
                 Act<A> act) {
  act_lines<true>(x, residual, y, rows, channels, 0, channels, factors, act);
}

template <typename T, typename A = Accumulate<T>>
GradSums act_grad_sums(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t n, int64_t stride,
                       int64_t channel, NormalizeFactors<A> factors, Act<A> act) {
  if (const auto sums = kBackward<T, A>[act.code].sums) {
    return sums(dy, x, residual, g, rows, n, stride, channel, factors, act.parameter);
  }
  act_grad_lines<false>(dy, x, residual, g, rows, n, stride, channel, factors, act);
  return grad_sums(g, x, factors.mean[channel], rows, n, stride);
}

template <typename T, typename A = Accumulate<T>>
void act_grad_sums_columns(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t channels, A* columns,
                           double* out, NormalizeFactors<A> factors, Act<A> act) {
  if (const auto sums = kBackward<T, A>[act.code].sums_columns) {
    return sums(dy, x, residual, g, rows, channels, columns, out, factors, act.parameter);
  }
  act_grad_lines<true>(dy, x, residual, g, rows, channels, channels, 0, factors, act);
  grad_sums_columns(g, x, factors.mean, nullptr, rows, channels, columns, out);
}

template <typename T, typename A = Accumulate<T>>
void act_input_grad_rows(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                         GradientFactors<A> factors, const A* shift, Act<A> act) {
  const BackwardFunctions<T, A>& functions = kBackward<T, A>[act.code];
  (factors.stream ? functions.streamed_rows : functions.rows)(dy, x, dx, rows, n, channel, channels, factors, shift,
                                                              act.parameter);
  if (factors.stream) end_streaming();
}

template <typename T, typename A = Accumulate<T>>
void act_input_grad_columns(const T* dy, const T* x, T* dx, int64_t rows, int64_t channels, GradientFactors<A> factors,
                            const A* shift, Act<A> act) {
  const BackwardFunctions<T, A>& functions = kBackward<T, A>[act.code];
  (factors.stream ? functions.streamed_columns : functions.columns)(dy, x, dx, rows, channels, 0, channels, factors,
                                                                    shift, act.parameter);
  if (factors.stream) end_streaming();
}
