// Vectors: GCC's and clang's vector extension, and how they are read and written.

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
using LaneMask = typename VectorOf<A>::mask;

template <typename A>
constexpr int kWidth = kBytes / sizeof(A);

template <typename V, typename T>
inline V load_bytes(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

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

template <bool kStream = false, typename T>
inline void narrow(T* p, Vec<Accumulate<T>> v) {
  store_bytes<kStream>(p, stored(v, T()));
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
inline LaneMask<A> lanes_below(int64_t n) {
  LaneMask<A> index;
  for (int i = 0; i < kWidth<A>; ++i) index[i] = i;
  return (LaneMask<A>)(index < (decltype(index[0] + 0))n);
}

template <typename A>
inline Vec<A> keep(LaneMask<A> mask, Vec<A> v) {
  return (Vec<A>)((LaneMask<A>)v & mask);
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

// How a whole vector is read and written.
struct Whole {
  template <typename T>
  inline auto load(const T* p) const {
    return widen(p);
  }
  template <bool kStream = false, typename T, typename V>
  inline void store(T* p, V v) const {
    narrow<kStream>(p, v);
  }
  template <typename T>
  inline void fetch(const T* p) const {
    prefetch(p);
  }
  // Zeros in lanes that have no value.
  template <typename A>
  inline Vec<A> only(Vec<A> v) const {
    return v;
  }
};

// How the first `count` < kWidth lanes of a vector are.
struct Part {
  int64_t count;
  template <typename T>
  inline auto load(const T* p) const {
    return widen_part(p, count);
  }
  template <bool kStream = false, typename T, typename V>
  inline void store(T* p, V v) const {
    narrow_part(p, v, count);
  }
  template <typename T>
  inline void fetch(const T*) const {}
  template <typename A>
  inline Vec<A> only(Vec<A> v) const {
    return keep<A>(lanes_below<A>(count), v);
  }
};

// Bytes as integers of the width of A. What GCC makes of its own conversion goes through memory.
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
inline LaneMask<float> widen_bytes(const uint8_t* p, float) {
  return (LaneMask<float>)_mm512_cvtepu8_epi32(load_bytes<__m128i>(p));
}
inline LaneMask<double> widen_bytes(const uint8_t* p, double) {
  return (LaneMask<double>)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
}
#elif BAGUA_SYNCBN_VECTOR_BYTES == 32
inline LaneMask<float> widen_bytes(const uint8_t* p, float) {
  return (LaneMask<float>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline LaneMask<double> widen_bytes(const uint8_t* p, double) {
  return (LaneMask<double>)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_bytes<int32_t>(p)));
}
#else
template <typename A>
inline LaneMask<A> widen_bytes(const uint8_t* p, A) {
  LaneMask<A> lanes;
  for (int i = 0; i < kWidth<A>; ++i) lanes[i] = p[i];
  return lanes;
}
#endif

// `v`, if values are masked with zeros where the bytes at `valid` are 0. Reads a byte for each lane, also of a part.
template <bool kMasked, typename A>
inline Vec<A> counted(const uint8_t* valid, Vec<A> v) {
  if constexpr (kMasked) return keep<A>(-widen_bytes(valid, A()), v);
  return v;
}
