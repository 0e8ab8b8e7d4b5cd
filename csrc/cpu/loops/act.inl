// Activations of z = (x - mean) * scale + shift + residual. Those of a few operations are computed where z
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

template <typename Activation, typename... Some>
constexpr bool kIsOneOf = (std::is_same_v<Activation, Some> || ...);

// is_cheap of ../../activations.h, by type.
#define BAGUA_SYNCBN_CHEAP(name, is_cheap) || (std::is_same_v<Activation, name> && is_cheap)
template <typename Activation>
constexpr bool kCheap = false BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CHEAP);
#undef BAGUA_SYNCBN_CHEAP

// Activations that are computed where z is.
template <typename Activation, typename A>
constexpr bool kDirect = kCheap<Activation> || std::is_same_v<Activation, Identity> ||
                         (std::is_same_v<A, float> && kIsOneOf<Activation, Silu, Gelu, Sigmoid>);

template <typename Activation, bool kStream, bool kColumns, typename T, typename A>
void values_of_rows(const T* x, const T* residual, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    const NormalizeFactors<A>& factors, A parameter) {
  normalize_lines<Activation, kStream, kColumns>(x, residual, y, Everywhere<A>(), rows, n, channel, channels, factors,
                                                 parameter);
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

#define BAGUA_SYNCBN_FUNCTIONS(Activation, ...) functions_of<Activation, kColumns, T, A>(),
template <bool kColumns, typename T, typename A>
constexpr Functions<kColumns, T, A> kFunctions[] = {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_FUNCTIONS)};
#undef BAGUA_SYNCBN_FUNCTIONS

template <bool kStream, typename T, typename A>
void write(const A* chunk, T* y, int64_t n) {
  for_each_column<A>(
      n, [&](int64_t j, const auto& access) { access.template store<kStream>(y + j, load_bytes<Vec<A>>(chunk + j)); });
}

template <typename T, typename A>
void write_gradient(const A* derivatives, const T* dy, T* g, int64_t n) {
  for_each_column<A>(n, [&](int64_t j, const auto& access) {
    access.fetch(dy + j + kAhead);
    access.store(g + j, access.load(dy + j) * load_bytes<Vec<A>>(derivatives + j));
  });
}

// Writes z to a chunk. Where n is not a number of whole vectors, what is behind the last value changes too.
template <bool kColumns, typename T, typename A>
void write_normalized(const T* x, const T* residual, A* chunk, int64_t n, const NormalizeFactors<A>& factors,
                      int64_t first) {
  for_each_normalized<kColumns>(x, residual, n, factors, first,
                                [&](int64_t j, Vec<A> z, const auto&) { narrow(chunk + j, z); });
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

// y = act(z) of rows as for normalize_lines.
template <bool kColumns, typename T, typename A>
inline void act_lines(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                      const NormalizeFactors<A>& factors, const Epilogue<T>& epilogue) {
  const Functions<kColumns, T, A>& functions = kFunctions<kColumns, T, A>[epilogue.act.code];
  if (const auto values = factors.stream ? functions.streamed_rows : functions.rows) {
    values(x, epilogue.residual, y, rows, n, channel, channels, factors, epilogue.act.parameter);
    if (factors.stream) end_streaming();
    return;
  }
  Chunk<A> chunk;
  for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
    const int64_t offset = row * n + begin;
    for (int64_t r = 0; r < some; ++r) {
      const int64_t first = kColumns ? begin : (channel + row + r) % channels, start = offset + r * n;
      write_normalized<kColumns>(x + start, epilogue.from(start).residual, chunk.values + r * count, count, factors,
                                 first);
    }
    functions.values(chunk.values, some * count, epilogue.act.parameter);
    (factors.stream ? write<true, T, A> : write<false, T, A>)(chunk.values, y + offset, some * count);
  });
  if (factors.stream) end_streaming();
}

// Writes g = dy * act'(z), of rows that are `stride` apart, of one channel or of one value for each channel.
template <bool kColumns, typename T>
inline void act_grad_lines(const Gradients<T>& of, int64_t rows, int64_t n, int64_t stride, int64_t channel) {
  using A = Accumulate<T>;
  Chunk<A> chunk;
  for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
    for (int64_t r = 0; r < some; ++r) {
      const Gradients<T> line = of.from((row + r) * stride + begin);
      write_normalized<kColumns>(line.x, line.epilogue.residual, chunk.values + r * count, count, of.factors,
                                 kColumns ? begin : channel);
    }
    kFunctions<kColumns, T, A>[of.epilogue.act.code].derivatives(chunk.values, some * count, of.epilogue.act.parameter);
    for (int64_t r = 0; r < some; ++r) {
      const Gradients<T> line = of.from((row + r) * stride + begin);
      write_gradient(chunk.values + r * count, line.dy, line.g, count);
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
  GradientOf(const Gradients<T>& of, int64_t channel)
      : residual(of.epilogue.residual),
        g(of.g),
        normalized(of.factors, channel),
        p(broadcast(of.epilogue.act.parameter)) {}

  template <typename Access>
  inline __attribute__((always_inline)) Vec<A> operator()(Vec<A> dy, Vec<A> x, int64_t offset, int64_t column,
                                                          const Access& access) const {
    Vec<A> z = normalized(x, column, access);
    if (residual != nullptr) z += access.load(residual + offset);
    const Vec<A> gradient = dy * Activation::derivative(z, p);
    if (g != nullptr) access.store(g + offset, gradient);
    return gradient;
  }
};

template <typename Activation, typename T, typename A>
GradSums gradient_sums(const Gradients<T>& of, int64_t rows, int64_t n, int64_t stride, int64_t channel) {
  const GradientOf<Activation, false, T, A> gradient(of, channel);
  return grad_sums_of<A>(of.dy, of.x, of.factors.mean[channel], Everywhere<A>(), rows, n, stride, gradient);
}

template <typename Activation, typename T, typename A>
void gradient_sums_columns(const Gradients<T>& of, int64_t rows, int64_t channels, A* columns, double* out) {
  const auto every = [](int64_t row) { return row; };
  const GradientOf<Activation, true, T, A> gradient(of, 0);
  grad_sums_columns_of(of.dy, of.x, of.factors.mean, every, rows, channels, columns, out, gradient);
}

template <typename Activation, bool kStream, bool kColumns, typename T, typename A>
void input_gradient(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    const GradientFactors<A>& factors, A parameter) {
  gradient_lines<Activation, kStream, kColumns>(dy, x, dx, Everywhere<A>(), true, rows, n, channel, channels, factors,
                                                parameter);
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
  if constexpr (kCheap<Activation> || std::is_same_v<Activation, Identity>) {
    functions.rows = input_gradient<Activation, false, false, T, A>;
    functions.streamed_rows = input_gradient<Activation, true, false, T, A>;
    functions.columns = input_gradient<Activation, false, true, T, A>;
    functions.streamed_columns = input_gradient<Activation, true, true, T, A>;
  }
  return functions;
}

#define BAGUA_SYNCBN_FUNCTIONS(Activation, ...) backward_functions_of<Activation, T, A>(),
template <typename T, typename A>
constexpr BackwardFunctions<T, A> kBackward[] = {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_FUNCTIONS)};
#undef BAGUA_SYNCBN_FUNCTIONS
