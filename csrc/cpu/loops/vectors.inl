// Vectors: GCC's and clang's vector extension, and conversion from and to the storage types.

template <typename A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kBytes)));
  typedef int32_t mask __attribute__((vector_size(kBytes)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kBytes)));
  typedef int64_t mask __attribute__((vector_size(kBytes)));
};

template <typename A>
using Vec = typename VectorOf<A>::type;
template <typename A>
using Mask = typename VectorOf<A>::mask;

template <typename A>
constexpr int kWidth = kBytes / sizeof(A);

typedef uint16_t Words __attribute__((vector_size(kBytes / 2)));
typedef uint32_t DoubleWords __attribute__((vector_size(kBytes)));

template <typename V, typename T>
inline V load_bytes(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

inline Vec<float> widen(const float* p) {
  return load_bytes<Vec<float>>(p);
}
inline Vec<double> widen(const double* p) {
  return load_bytes<Vec<double>>(p);
}
inline Vec<float> widen(const BFloat16Bits* p) {
  // A bfloat16 is the upper half of a float.
  return (Vec<float>)(__builtin_convertvector(load_bytes<Words>(p), DoubleWords) << 16);
}

inline Words to_bfloat16(Vec<float> v) {
  const DoubleWords bits = (DoubleWords)v;
  const DoubleWords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const DoubleWords quiet_nan = (bits >> 16) | 0x40;                       // rounding could carry a NaN to infinity
  return __builtin_convertvector(v == v ? rounded : quiet_nan, Words);
}

#if BAGUA_SYNCBN_VECTOR_BYTES == 64
inline Vec<float> widen(const HalfBits* p) {
  return (Vec<float>)_mm512_cvtph_ps(load_bytes<__m256i>(p));
}
inline Words to_half(Vec<float> v) {
  return (Words)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif BAGUA_SYNCBN_VECTOR_BYTES == 32
inline Vec<float> widen(const HalfBits* p) {
  return (Vec<float>)_mm256_cvtph_ps(load_bytes<__m128i>(p));
}
inline Words to_half(Vec<float> v) {
  return (Words)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Calls: within the loops they would be most of the code.
__attribute__((noinline)) Vec<float> widen(const HalfBits* p) {
  Vec<float> v;
  for (int i = 0; i < kWidth<float>; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(p[i].bits);
  return v;
}
__attribute__((noinline)) Words to_half(Vec<float> v) {
  Words words;
  for (int i = 0; i < kWidth<float>; ++i) words[i] = c10::detail::fp16_ieee_from_fp32_value(v[i]);
  return words;
}
#endif

// Writes a vector. A streaming store goes around the caches, to an address aligned to the vector.
template <bool kStream, typename V, typename T>
inline void store_bytes(T* p, V v) {
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
  if (kStream && sizeof(V) == 64) return _mm512_stream_si512((__m512i*)p, load_bytes<__m512i>(&v));
#endif
#if BAGUA_SYNCBN_VECTOR_BYTES >= 32
  if (kStream && sizeof(V) == 32) return _mm256_stream_si256((__m256i*)p, load_bytes<__m256i>(&v));
  if (kStream && sizeof(V) == 16) return _mm_stream_si128((__m128i*)p, load_bytes<__m128i>(&v));
#endif
  __builtin_memcpy(p, &v, sizeof(v));
}

template <bool kStream = false>
inline void narrow(float* p, Vec<float> v) {
  store_bytes<kStream>(p, v);
}
template <bool kStream = false>
inline void narrow(double* p, Vec<double> v) {
  store_bytes<kStream>(p, v);
}
template <bool kStream = false>
inline void narrow(BFloat16Bits* p, Vec<float> v) {
  store_bytes<kStream>(p, to_bfloat16(v));
}
template <bool kStream = false>
inline void narrow(HalfBits* p, Vec<float> v) {
  store_bytes<kStream>(p, to_half(v));
}

// Before another thread may read what was streamed.
inline void end_streaming() {
#if BAGUA_SYNCBN_VECTOR_BYTES >= 32
  _mm_sfence();
#endif
}

// How far ahead to prefetch, in values. The hardware's prefetcher stops at each page of 4 KiB.
constexpr int64_t kAhead = 1024;

// Into the L2 cache.
template <typename T>
inline void prefetch(const T* p) {
  __builtin_prefetch(p, 0, 2);
}

template <typename A>
inline Vec<A> broadcast(A value) {
  return Vec<A>{} + value;
}

// All bits set in the lanes below n.
template <typename A>
inline Mask<A> lanes_below(int64_t n) {
  Mask<A> index;
  for (int i = 0; i < kWidth<A>; ++i) index[i] = i;
  return (Mask<A>)(index < (decltype(index[0] + 0))n);
}

template <typename A>
inline Vec<A> keep(Mask<A> mask, Vec<A> v) {
  return (Vec<A>)((Mask<A>)v & mask);
}

// The n < kWidth values at p, and zeros.
template <typename T, typename A = Accumulate<T>>
inline Vec<A> widen_part(const T* p, int64_t n) {
  T buffer[kWidth<A>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return widen(buffer);
}

template <typename T, typename A = Accumulate<T>>
inline void narrow_part(T* p, Vec<A> v, int64_t n) {
  T buffer[kWidth<A>];
  narrow(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

#if BAGUA_SYNCBN_VECTOR_BYTES == 64
// AVX-512 has loads and stores of a part, which rows of few values spend most of their time in.
inline uint32_t mask_below(int64_t n) {
  return (1u << n) - 1;
}

inline Vec<float> widen_part(const float* p, int64_t n) {
  return (Vec<float>)_mm512_maskz_loadu_ps(mask_below(n), p);
}
inline Vec<double> widen_part(const double* p, int64_t n) {
  return (Vec<double>)_mm512_maskz_loadu_pd(mask_below(n), p);
}
inline void narrow_part(float* p, Vec<float> v, int64_t n) {
  _mm512_mask_storeu_ps(p, mask_below(n), (__m512)v);
}
inline void narrow_part(double* p, Vec<double> v, int64_t n) {
  _mm512_mask_storeu_pd(p, mask_below(n), (__m512d)v);
}
#endif
