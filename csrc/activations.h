// Activations of fused ops: their list, in the order of bagua_syncbn/ops/activations.py, and, if BAGUA_SYNCBN_FORMULAS
// is defined, their values and derivatives for scalars or vectors V.
//
// Each instruction set, and CUDA, includes this file in a namespace that defines
//
//   of<V>(constant), exp_of(V), expm1_of(V), sigmoid_of(V), tanh_of(V)
//   normal_cdf(V)        cumulative distribution function of the normal distribution
//   exp_between(V)       exp for results that are neither subnormal nor close to overflow
#if !defined(BAGUA_SYNCBN_ACTIVATIONS)

#include <cstdint>

#define BAGUA_SYNCBN_ACTIVATIONS(DO) \
  DO(Identity)                       \
  DO(Relu)                           \
  DO(Relu6)                          \
  DO(LeakyRelu)                      \
  DO(Elu)                            \
  DO(Silu)                           \
  DO(Gelu)                           \
  DO(GeluTanh)                       \
  DO(Hardswish)                      \
  DO(Sigmoid)                        \
  DO(Tanh)

namespace bagua_syncbn {

#define BAGUA_SYNCBN_CODE(name) k##name,
enum class Code : int64_t { BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_CODE) };
#undef BAGUA_SYNCBN_CODE

#define BAGUA_SYNCBN_ONE(name) +1
constexpr int64_t kActivations = BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_ONE);
#undef BAGUA_SYNCBN_ONE

// An activation. Only leaky_relu and elu use `parameter`.
template <typename A>
struct Act {
  int64_t code;
  A parameter;

  template <typename B>
  explicit operator Act<B>() const {
    return {code, static_cast<B>(parameter)};
  }
};

}  // namespace bagua_syncbn

#endif
#if defined(BAGUA_SYNCBN_FORMULAS)

// Derivatives at kinks equal torch's. `p` is the parameter.
#define BAGUA_SYNCBN_VALUE \
  template <typename V>    \
  BAGUA_SYNCBN_HOST_DEVICE static V value(V z, [[maybe_unused]] V p)
#define BAGUA_SYNCBN_DERIVATIVE \
  template <typename V>         \
  BAGUA_SYNCBN_HOST_DEVICE static V derivative([[maybe_unused]] V z, [[maybe_unused]] V p)

struct Identity {
  BAGUA_SYNCBN_VALUE { return z; }
  BAGUA_SYNCBN_DERIVATIVE { return of<V>(1); }
};

struct Relu {
  BAGUA_SYNCBN_VALUE { return z < of<V>(0) ? of<V>(0) : z; }
  BAGUA_SYNCBN_DERIVATIVE { return z > of<V>(0) ? of<V>(1) : of<V>(0); }
};

struct Relu6 {
  BAGUA_SYNCBN_VALUE {
    const V upper = z > of<V>(6) ? of<V>(6) : z;
    return upper < of<V>(0) ? of<V>(0) : upper;
  }
  BAGUA_SYNCBN_DERIVATIVE {
    const V below = z < of<V>(6) ? of<V>(1) : of<V>(0);
    return z > of<V>(0) ? below : of<V>(0);
  }
};

struct LeakyRelu {
  BAGUA_SYNCBN_VALUE { return z > of<V>(0) ? z : z * p; }
  BAGUA_SYNCBN_DERIVATIVE { return z > of<V>(0) ? of<V>(1) : p; }
};

struct Elu {
  BAGUA_SYNCBN_VALUE { return z > of<V>(0) ? z : p * expm1_of(z); }
  BAGUA_SYNCBN_DERIVATIVE { return z > of<V>(0) ? of<V>(1) : p * exp_of(z); }
};

struct Silu {
  BAGUA_SYNCBN_VALUE { return z * sigmoid_of(z); }
  BAGUA_SYNCBN_DERIVATIVE {
    const V s = sigmoid_of(z);
    return s * (of<V>(1) + z * (of<V>(1) - s));
  }
};

struct Gelu {
  BAGUA_SYNCBN_VALUE { return z * normal_cdf(z); }
  BAGUA_SYNCBN_DERIVATIVE { return normal_cdf(z) + z * exp_between(of<V>(-0.5) * z * z) * of<V>(0.3989422804014327); }
};

struct GeluTanh {
  static constexpr double kScale = 0.7978845608028654, kCubic = 0.044715;  // sqrt(2 / pi)
  template <typename V>
  BAGUA_SYNCBN_HOST_DEVICE static V tanh_part(V z) {
    return tanh_of(of<V>(kScale) * (z + of<V>(kCubic) * z * z * z));
  }
  BAGUA_SYNCBN_VALUE { return of<V>(0.5) * z * (of<V>(1) + tanh_part(z)); }
  BAGUA_SYNCBN_DERIVATIVE {
    const V t = tanh_part(z), slope = of<V>(kScale) + of<V>(3 * kScale * kCubic) * z * z;
    return of<V>(0.5) * (of<V>(1) + t) + of<V>(0.5) * z * (of<V>(1) - t * t) * slope;
  }
};

struct Hardswish {
  BAGUA_SYNCBN_VALUE { return z * Relu6::value(z + of<V>(3), p) * of<V>(1.0 / 6); }
  BAGUA_SYNCBN_DERIVATIVE {
    const V below = z < of<V>(3) ? z * of<V>(1.0 / 3) + of<V>(0.5) : of<V>(1);
    return z > of<V>(-3) ? below : of<V>(0);
  }
};

struct Sigmoid {
  BAGUA_SYNCBN_VALUE { return sigmoid_of(z); }
  BAGUA_SYNCBN_DERIVATIVE {
    const V s = sigmoid_of(z);
    return s * (of<V>(1) - s);
  }
};

struct Tanh {
  BAGUA_SYNCBN_VALUE { return tanh_of(z); }
  BAGUA_SYNCBN_DERIVATIVE {
    const V t = tanh_of(z);
    return of<V>(1) - t * t;
  }
};

#undef BAGUA_SYNCBN_VALUE
#undef BAGUA_SYNCBN_DERIVATIVE

#undef BAGUA_SYNCBN_FORMULAS
#endif
