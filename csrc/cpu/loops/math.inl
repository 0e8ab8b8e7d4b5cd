// Functions for activations. Float: polynomials, within 2 units in the last place of the result (normal_cdf: of 1),
// with the same bits on every instruction set. Double: the C library's functions, lane by lane.

template <typename V>
inline V of(double constant) {
  return V{} + static_cast<decltype(V{}[0] + 0)>(constant);
}

// Returns a * b + c, rounded once.
#if defined(BAGUA_SYNCBN_MM)
inline Vec<float> fused_multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)BAGUA_SYNCBN_MM(fmadd_ps)(a, b, c);
}
#else
#if !defined(__FP_FAST_FMAF)
__attribute__((noinline))  // inlined calls of the C library would make up most of the loops' code
#endif
Vec<float> fused_multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
  for (int i = 0; i < kWidth<float>; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#endif

// c[0] + c[1] * x + c[2] * x^2 + ...
template <int n>
inline Vec<float> polynomial(const float (&c)[n], Vec<float> x) {
  Vec<float> sum = broadcast(c[n - 1]);
#pragma GCC unroll 8
  for (int i = n - 2; i >= 0; --i) sum = fused_multiply_add(sum, x, broadcast(c[i]));
  return sum;
}

// 2^k for k from -126 to 127.
inline Vec<float> power_of_two(LaneMask<float> k) {
  return (Vec<float>)((k + 127) << 23);
}

// Splits x = k * log(2) + r with |r| <= log(2) / 2, for |x| < 2^15, and computes exp(r) - 1.
struct Reduced {
  LaneMask<float> k;
  Vec<float> expm1;

  explicit Reduced(Vec<float> x) {
    const Vec<float> round = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec<float> shifted = fused_multiply_add(x, broadcast(1.44269504f), round);
    const Vec<float> whole = shifted - round;
    k = (LaneMask<float>)shifted - (LaneMask<float>)round;
    const Vec<float> part = fused_multiply_add(whole, broadcast(-0.693359375f), x);
    const Vec<float> r = fused_multiply_add(whole, broadcast(2.12194440e-4f), part);  // log(2) in two parts
    expm1 = fused_multiply_add(r * r, polynomial({0.5f, 0.16666518f, 0.041666206f, 8.368953e-3f, 1.3950602e-3f}, r), r);
  }
};

inline Vec<float> clamp(Vec<float> x, float low, float high) {  // keeps NaN
#if defined(BAGUA_SYNCBN_MM)
  return (Vec<float>)BAGUA_SYNCBN_MM(max_ps)(broadcast(low), BAGUA_SYNCBN_MM(min_ps)(broadcast(high), x));
#else
  x = x > high ? broadcast(high) : x;
  return x < low ? broadcast(low) : x;
#endif
}

// Clamps the result to normal numbers.
inline Vec<float> exp_of(Vec<float> x) {
  const Reduced reduced(clamp(x, -87.0f, 88.0f));
  return (reduced.expm1 + 1.0f) * power_of_two(reduced.k);
}

inline Vec<float> magnitude(Vec<float> x) {
  return (Vec<float>)((LaneMask<float>)x & 0x7fffffff);
}

// For x <= 0.
inline Vec<float> expm1_of(Vec<float> x) {
  const Reduced reduced(clamp(x, -80.0f, 0.0f));
  const Vec<float> power = power_of_two(reduced.k);
  return reduced.expm1 * power + (power - 1.0f);
}

inline Vec<float> tanh_of(Vec<float> x) {
  const Vec<float> square = x * x, a = magnitude(x);
  const Vec<float> small =
      x + x * square * polynomial({-0.33333284f, 0.1333149f, -0.053743497f, 0.020650586f, -5.717045e-3f}, square);
  const Vec<float> large = 1.0f - 2.0f / (exp_of(a + a) + 1.0f);
  const Vec<float> with_sign = (Vec<float>)((LaneMask<float>)large | ((LaneMask<float>)x & ~0x7fffffff));
  return a < 0.625f ? small : with_sign;
}

inline Vec<float> normal_cdf(Vec<float> z) {
  // The tail is exp(-z^2 / 2) times a slowly decreasing function.
  const Vec<float> t = 1.0f / (magnitude(z) * 0.3f + 1.0f);
  const Vec<float> slow =
      t * polynomial({0.12522973f, 0.06854852f, 0.3070138f, -0.3245912f, 0.53686184f, -0.25193346f, 0.03887071f}, t);
  const Vec<float> tail = exp_of(-0.5f * z * z) * slow;
  return z > 0.0f ? 1.0f - tail : tail;
}

// Not inlined: they would make up most of the loops' code.
#define BAGUA_SYNCBN_OF_DOUBLES(name, function)                     \
  __attribute__((noinline)) Vec<double> name(Vec<double> x) {       \
    for (int i = 0; i < kWidth<double>; ++i) x[i] = function(x[i]); \
    return x;                                                       \
  }
BAGUA_SYNCBN_OF_DOUBLES(exp_of, __builtin_exp)
BAGUA_SYNCBN_OF_DOUBLES(expm1_of, __builtin_expm1)
BAGUA_SYNCBN_OF_DOUBLES(tanh_of, __builtin_tanh)
BAGUA_SYNCBN_OF_DOUBLES(erfc_of, __builtin_erfc)
#undef BAGUA_SYNCBN_OF_DOUBLES

inline Vec<double> normal_cdf(Vec<double> z) {
  return 0.5 * erfc_of(z * -0.7071067811865476);
}

template <typename V>
inline V sigmoid_of(V x) {
  return of<V>(1) / (of<V>(1) + exp_of(-x));
}
