// The functions of each activation, and which of them a loop takes: see act.inl.

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
  normalize_lines<Activation, kStream, kColumns>(x, residual, y, rows, n, channel, channels, factors, parameter);
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
  BAGUA_SYNCBN_IN_LOOPS Vec<A> operator()(Vec<A> dy, Vec<A> x, int64_t offset, int64_t column,
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
  return grad_sums_of<A>(of.dy, of.x, of.factors.mean[channel], rows, n, stride, gradient);
}

template <typename Activation, typename T, typename A>
void gradient_sums_columns(const Gradients<T>& of, int64_t rows, int64_t channels, A* columns, double* out) {
  const GradientOf<Activation, true, T, A> gradient(of, 0);
  grad_sums_columns_of(of.dy, of.x, of.factors.mean, rows, channels, columns, out, gradient);
}

template <typename Activation, bool kStream, bool kColumns, typename T, typename A>
void input_gradient(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    const GradientFactors<A>& factors, A parameter) {
  gradient_lines<Activation, kStream, kColumns>(dy, x, dx, Everywhere<A>(), rows, n, channel, channels, factors,
                                                parameter);
}

// The functions of an activation, null where there is none: of a chunk; or of rows, and sums, if it is direct; and
// gradients of the input if it is cheap. Second in a pair is the one with streaming stores.
template <bool kColumns, typename T, typename A>
struct Functions {
  using Sums = std::conditional_t<kColumns, decltype(&gradient_sums_columns<Identity, T, A>),
                                  decltype(&gradient_sums<Identity, T, A>)>;

  decltype(&activate<Identity, false, A>) values, derivatives;
  decltype(&values_of_rows<Identity, false, kColumns, T, A>) rows[2];
  Sums sums;
  decltype(&input_gradient<Identity, false, kColumns, T, A>) gradients[2];
};

template <typename Activation, bool kColumns, typename T, typename A>
constexpr Functions<kColumns, T, A> functions_of() {
  Functions<kColumns, T, A> functions = {};
  if constexpr (kDirect<Activation, A>) {
    functions.rows[0] = values_of_rows<Activation, false, kColumns, T, A>;
    functions.rows[1] = values_of_rows<Activation, true, kColumns, T, A>;
    if constexpr (kColumns) {
      functions.sums = gradient_sums_columns<Activation, T, A>;
    } else {
      functions.sums = gradient_sums<Activation, T, A>;
    }
  } else {
    functions.values = activate<Activation, false, A>;
    functions.derivatives = activate<Activation, true, A>;
  }
  if constexpr (kCheap<Activation> || std::is_same_v<Activation, Identity>) {
    functions.gradients[0] = input_gradient<Activation, false, kColumns, T, A>;
    functions.gradients[1] = input_gradient<Activation, true, kColumns, T, A>;
  }
  return functions;
}

#define BAGUA_SYNCBN_FUNCTIONS(Activation, ...) functions_of<Activation, kColumns, T, A>(),
template <bool kColumns, typename T, typename A>
constexpr Functions<kColumns, T, A> kFunctions[] = {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_FUNCTIONS)};
#undef BAGUA_SYNCBN_FUNCTIONS
