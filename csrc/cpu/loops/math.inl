// Functions for activations. Float: polynomials, with errors of at most 2 units in the last place (normal_cdf: 2^-22).
// Double: the C library's functions, lane by lane.

// c[0] + c[1] * x + c[2] * x^2 + ...
template <int n>
inline Vec<float> polynomial(const float (&c)[n], Vec<float> x) {
  Vec<float> sum = of<Vec<float>>(c[n - 1]);
#pragma GCC unroll 8
  for (int i = n - 2; i >= 0; --i) sum = sum * x + c[i];
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
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vec<float> shifted = x * 1.44269504f + kRound, whole = shifted - kRound;
    k = (LaneMask<float>)shifted - (LaneMask<float>)of<Vec<float>>(kRound);
    const Vec<float> r = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // log(2) in two parts; the first is exact
    expm1 = r * r * polynomial({0.5f, 0.16666518f, 0.041666206f, 8.368953e-3f, 1.3950602e-3f}, r) + r;
  }
};

inline Vec<float> clamp(Vec<float> x, float low, float high) {  // keeps NaN
  const Vec<float> lower = of<Vec<float>>(low), upper = of<Vec<float>>(high);
  x = x > upper ? upper : x;
  return x < lower ? lower : x;
}

// Clamps the result so that it and its inverse are normal numbers; arithmetic with subnormal numbers is slow.
inline Vec<float> exp_of(Vec<float> x) {
  const Reduced reduced(clamp(x, -87.0f, 87.0f));
  return (reduced.expm1 + 1.0f) * power_of_two(reduced.k);
}

// For x <= 0.
inline Vec<float> expm1_of(Vec<float> x) {
  const Reduced reduced(clamp(x, -80.0f, 0.0f));
  const Vec<float> power = power_of_two(reduced.k);
  return reduced.expm1 * power + (power - 1.0f);
}

constexpr int32_t kSign = int32_t(1) << 31;

inline Vec<float> magnitude(Vec<float> x) {
  return (Vec<float>)((LaneMask<float>)x & ~kSign);
}

inline Vec<float> tanh_of(Vec<float> x) {
  const Vec<float> t = expm1_of(-2.0f * magnitude(x)), result = magnitude(t / (t + 2.0f));
  return (Vec<float>)((LaneMask<float>)result | ((LaneMask<float>)x & kSign));
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
#define BAGUA_SYNCBN_OF_DOUBLES(name, value)                             \
  __attribute__((noinline)) Vec<double> name(Vec<double> x) {            \
    for (int lane = 0; lane < kWidth<double>; ++lane) x[lane] = (value); \
    return x;                                                            \
  }
BAGUA_SYNCBN_OF_DOUBLES(exp_of, __builtin_exp(x[lane]))
BAGUA_SYNCBN_OF_DOUBLES(expm1_of, __builtin_expm1(x[lane]))
BAGUA_SYNCBN_OF_DOUBLES(tanh_of, __builtin_tanh(x[lane]))
BAGUA_SYNCBN_OF_DOUBLES(normal_cdf, 0.5 * __builtin_erfc(x[lane] * -0.7071067811865476))
#undef BAGUA_SYNCBN_OF_DOUBLES

template <typename V>
inline V sigmoid_of(V x) {
  return of<V>(1) / (of<V>(1) + exp_of(-x));
}
