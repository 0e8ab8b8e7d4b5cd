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

// One factor for all values of a row; one for each.
template <typename A>
struct RowFactors {
  Vec<A> mean, scale, shift;
  RowFactors(const NormalizeFactors<A>& factors, int64_t channel)
      : mean(broadcast(factors.mean[channel])),
        scale(broadcast(factors.scale[channel])),
        shift(broadcast(factors.shift[channel])) {}

  Vec<A> normalize(Vec<A> x, int64_t) const { return (x - mean) * scale + shift; }
  Vec<A> normalize_part(Vec<A> x, int64_t, int64_t) const { return (x - mean) * scale + shift; }
};
template <typename A>
struct ColumnFactors {
  const A *mean, *scale, *shift;
  ColumnFactors(const NormalizeFactors<A>& factors, int64_t begin)
      : mean(factors.mean + begin), scale(factors.scale + begin), shift(factors.shift + begin) {}

  Vec<A> normalize(Vec<A> x, int64_t j) const { return (x - widen(mean + j)) * widen(scale + j) + widen(shift + j); }
  Vec<A> normalize_part(Vec<A> x, int64_t j, int64_t count) const {
    return (x - widen_part(mean + j, count)) * widen_part(scale + j, count) + widen_part(shift + j, count);
  }
};

// What to activate, of n values of a row; `residual` may be null.
template <typename T, typename A, typename Factors>
struct Line {
  const T* x;
  const T* residual;
  int64_t n;
  Factors factors;

  Line(const T* x, const T* residual, int64_t offset, int64_t n, const Factors& factors)
      : x(x + offset), residual(residual ? residual + offset : nullptr), n(n), factors(factors) {}

  // Calls body(j, z) for each vector, and tail(j, z, count) for the last count values.
  template <typename Body, typename Tail>
  inline __attribute__((always_inline)) void for_each(const Body& body, const Tail& tail) const {
    for_each_column<A>(
        n,
        [&](int64_t j) {
          prefetch(x + j + kAhead);
          const Vec<A> z = factors.normalize(widen(x + j), j);
          if (residual == nullptr) return body(j, z);
          prefetch(residual + j + kAhead);
          body(j, z + widen(residual + j));
        },
        [&](int64_t j, int64_t count) {
          const Vec<A> z = factors.normalize_part(widen_part(x + j, count), j, count);
          tail(j, residual == nullptr ? z : z + widen_part(residual + j, count), count);
        });
  }

  // Where n is not a number of whole vectors, what is behind the last value changes too.
  void write_to(A* chunk) const {
    for_each([&](int64_t j, Vec<A> z) { narrow(chunk + j, z); },
             [&](int64_t j, Vec<A> z, int64_t) { narrow(chunk + j, z); });
  }
};

template <typename Activation, typename... Some>
constexpr bool kIsOneOf = (std::is_same_v<Activation, Some> || ...);

// Activations that are computed where z is.
template <typename Activation, typename A>
constexpr bool kDirect = kIsOneOf<Activation, Identity, Relu, Relu6, LeakyRelu, Hardswish> ||
                         (std::is_same_v<A, float> && kIsOneOf<Activation, Silu, Gelu>);

template <typename Activation, bool kStream, typename T, typename A, typename Factors>
void value_of_line(const Line<T, A, Factors>& line, T* y, A parameter) {
  const Vec<A> p = broadcast(parameter);
  line.for_each([&](int64_t j, Vec<A> z) { narrow<kStream>(y + j, Activation::value(z, p)); },
                [&](int64_t j, Vec<A> z, int64_t count) { narrow_part(y + j, Activation::value(z, p), count); });
}

template <typename Activation, typename T, typename A, typename Factors>
void gradient_of_line(const Line<T, A, Factors>& line, const T* dy, T* g, A parameter) {
  const Vec<A> p = broadcast(parameter);
  line.for_each(
      [&](int64_t j, Vec<A> z) {
        prefetch(dy + j + kAhead);
        narrow(g + j, widen(dy + j) * Activation::derivative(z, p));
      },
      [&](int64_t j, Vec<A> z, int64_t count) {
        narrow_part(g + j, widen_part(dy + j, count) * Activation::derivative(z, p), count);
      });
}

// The functions of an activation: of a line if it is direct, of a chunk if not, and null for the other.
template <typename T, typename A, typename Factors>
struct Functions {
  void (*value)(const Line<T, A, Factors>&, T*, A);
  void (*streamed_value)(const Line<T, A, Factors>&, T*, A);
  void (*gradient)(const Line<T, A, Factors>&, const T*, T*, A);
  void (*values)(A*, int64_t, A);
  void (*derivatives)(A*, int64_t, A);
};

template <typename Activation, typename T, typename A, typename Factors>
constexpr Functions<T, A, Factors> functions_of() {
  if constexpr (kDirect<Activation, A>) {
    return {value_of_line<Activation, false, T, A, Factors>, value_of_line<Activation, true, T, A, Factors>,
            gradient_of_line<Activation, T, A, Factors>, nullptr, nullptr};
  } else {
    return {nullptr, nullptr, nullptr, activate<Activation, false, A>, activate<Activation, true, A>};
  }
}

#define BAGUA_SYNCBN_FUNCTIONS(Activation) functions_of<Activation, T, A, Factors>(),
template <typename T, typename A, typename Factors>
constexpr Functions<T, A, Factors> kFunctions[] = {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_FUNCTIONS)};
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

// Rows of n values that follow each other; `factors_of(row, begin)` are those of a row from its value `begin` on.
template <typename Factors, typename T, typename A, typename FactorsOf>
inline void act_lines(const T* x, const T* residual, T* y, int64_t rows, int64_t n, const FactorsOf& factors_of,
                      bool stream, Act<A> act) {
  const Functions<T, A, Factors>& functions = kFunctions<T, A, Factors>[act.code];
  if (const auto value = stream ? functions.streamed_value : functions.value) {
    for (int64_t row = 0; row < rows; ++row) {
      value({x, residual, row * n, n, factors_of(row, 0)}, y + row * n, act.parameter);
    }
  } else {
    Chunk<A> chunk;
    for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
      const int64_t offset = row * n + begin;
      for (int64_t r = 0; r < some; ++r) {
        const Line<T, A, Factors> line(x, residual, offset + r * n, count, factors_of(row + r, begin));
        line.write_to(chunk.values + r * count);
      }
      functions.values(chunk.values, some * count, act.parameter);
      (stream ? write<true, T, A> : write<false, T, A>)(chunk.values, y + offset, some * count);
    });
  }
  if (stream) end_streaming();
}

// Rows of n values that are `stride` apart.
template <typename Factors, typename T, typename A, typename FactorsOf>
inline void act_grad_lines(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t n, int64_t stride,
                           const FactorsOf& factors_of, Act<A> act) {
  const Functions<T, A, Factors>& functions = kFunctions<T, A, Factors>[act.code];
  if (const auto gradient = functions.gradient) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t offset = row * stride;
      gradient({x, residual, offset, n, factors_of(0)}, dy + offset, g + offset, act.parameter);
    }
    return;
  }
  Chunk<A> chunk;
  for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
    const int64_t offset = row * stride + begin;
    for (int64_t r = 0; r < some; ++r) {
      const Line<T, A, Factors> line(x, residual, offset + r * stride, count, factors_of(begin));
      line.write_to(chunk.values + r * count);
    }
    functions.derivatives(chunk.values, some * count, act.parameter);
    for (int64_t r = 0; r < some; ++r) {
      write_gradient(chunk.values + r * count, dy + offset + r * stride, g + offset + r * stride, count);
    }
  });
}

template <typename T, typename A = Accumulate<T>>
void act_rows(const T* x, const T* residual, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
              NormalizeFactors<A> factors, Act<A> act) {
  const auto factors_of = [&](int64_t row, int64_t) { return RowFactors<A>(factors, (channel + row) % channels); };
  act_lines<RowFactors<A>>(x, residual, y, rows, n, factors_of, factors.stream, act);
}

template <typename T, typename A = Accumulate<T>>
void act_columns(const T* x, const T* residual, T* y, int64_t rows, int64_t channels, NormalizeFactors<A> factors,
                 Act<A> act) {
  const auto factors_of = [&](int64_t, int64_t begin) { return ColumnFactors<A>(factors, begin); };
  act_lines<ColumnFactors<A>>(x, residual, y, rows, channels, factors_of, factors.stream, act);
}

template <typename T, typename A = Accumulate<T>>
void act_grad_rows(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t n, int64_t stride,
                   int64_t channel, NormalizeFactors<A> factors, Act<A> act) {
  const auto factors_of = [&](int64_t) { return RowFactors<A>(factors, channel); };
  act_grad_lines<RowFactors<A>>(dy, x, residual, g, rows, n, stride, factors_of, act);
}

template <typename T, typename A = Accumulate<T>>
void act_grad_columns(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t channels,
                      NormalizeFactors<A> factors, Act<A> act) {
  const auto factors_of = [&](int64_t begin) { return ColumnFactors<A>(factors, begin); };
  act_grad_lines<ColumnFactors<A>>(dy, x, residual, g, rows, channels, channels, factors_of, act);
}
