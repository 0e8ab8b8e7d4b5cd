// The float dtypes that tensors can have: the one list of them, the type in which their values are computed, and how
// they are converted to it and back.
//
// By itself it is the list. With BAGUA_SYNCBN_VECTOR_CONVERSIONS defined it is the conversions of vectors, included
// once for each instruction set by cpu/loops/vectors.inl. Those of CUDA are in cuda/values.cuh.
//
// A new dtype is a line here, its name in kDTypeNames, its storage and its conversions; and a line in
// DTYPES of bagua_syncbn/ops/definition.py, in the same order.
#if !defined(BAGUA_SYNCBN_DTYPES)

#include <cstdint>
#include <type_traits>

// DO(name in torch's ScalarType, type of a stored value in torch, in the loops of cpu/loops.h, in CUDA)
#define BAGUA_SYNCBN_DTYPES(DO)                                          \
  DO(Half, torch::headeronly::Half, HalfBits, __half)                    \
  DO(BFloat16, torch::headeronly::BFloat16, BFloat16Bits, __nv_bfloat16) \
  DO(Float, float, float, float)                                         \
  DO(Double, double, double, double)

namespace bagua_syncbn {

// Storage of half-precision values on CPU, without arithmetic.
struct HalfBits {
  uint16_t bits;
};
struct BFloat16Bits {
  uint16_t bits;
};

constexpr const char* kDTypeNames = "float16, bfloat16, float32 or float64";

enum class DType : int32_t {
#define BAGUA_SYNCBN_NAME(name, ...) k##name,
  BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_NAME)
#undef BAGUA_SYNCBN_NAME
};

// The type in which values of type T are computed: double for double, float for any other.
template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace bagua_syncbn

#endif
#if defined(BAGUA_SYNCBN_VECTOR_CONVERSIONS)

// `widen` reads a vector; `stored` makes of one what is written, of the type of its second argument.
inline Vec<float> widen(const float* p) {
  return load_bytes<Vec<float>>(p);
}
inline Vec<float> stored(Vec<float> v, float) {
  return v;
}

inline Vec<double> widen(const double* p) {
  return load_bytes<Vec<double>>(p);
}
inline Vec<double> stored(Vec<double> v, double) {
  return v;
}

typedef uint16_t Bits16 __attribute__((vector_size(kBytes / 2)));
typedef uint32_t Bits32 __attribute__((vector_size(kBytes)));

inline Vec<float> widen(const BFloat16Bits* p) {
  // A bfloat16 is the upper half of a float.
  return (Vec<float>)(__builtin_convertvector(load_bytes<Bits16>(p), Bits32) << 16);
}
inline Bits16 stored(Vec<float> v, BFloat16Bits) {
  const Bits32 bits = (Bits32)v;
  const Bits32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const Bits32 quiet_nan = (bits >> 16) | 0x40;                       // rounding could carry a NaN to infinity
  return __builtin_convertvector(v == v ? rounded : quiet_nan, Bits16);
}

#if BAGUA_SYNCBN_VECTOR_BYTES == 64
inline Vec<float> widen(const HalfBits* p) {
  return (Vec<float>)_mm512_cvtph_ps(load_bytes<__m256i>(p));
}
inline Bits16 stored(Vec<float> v, HalfBits) {
  return (Bits16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif BAGUA_SYNCBN_VECTOR_BYTES == 32
inline Vec<float> widen(const HalfBits* p) {
  return (Vec<float>)_mm256_cvtph_ps(load_bytes<__m128i>(p));
}
inline Bits16 stored(Vec<float> v, HalfBits) {
  return (Bits16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Calls: within the loops they would be most of the code.
__attribute__((noinline)) Vec<float> widen(const HalfBits* p) {
  Vec<float> v;
  for (int i = 0; i < kWidth<float>; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(p[i].bits);
  return v;
}
__attribute__((noinline)) Bits16 stored(Vec<float> v, HalfBits) {
  Bits16 bits;
  for (int i = 0; i < kWidth<float>; ++i) bits[i] = c10::detail::fp16_ieee_from_fp32_value(v[i]);
  return bits;
}
#endif

#undef BAGUA_SYNCBN_VECTOR_CONVERSIONS
#endif
