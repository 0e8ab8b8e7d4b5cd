// Vectors (a GCC and clang extension), loads, stores and conversions.

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kBytes)));
};

template <typename A>
using Vec = typename VectorOf<A>::type;
template <typename A>
using LaneMask = decltype(Vec<A>() < Vec<A>());  // signed integers as wide as A

template <typename A>
constexpr int kWidth = kBytes / sizeof(A);

// A vector of equal values.
template <typename V>
inline V of(double value) {
  return V{} + static_cast<decltype(V{}[0] + 0)>(value);
}

template <typename V, typename T>
inline V load_bytes(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

// A streaming store bypasses the caches. Its address must be aligned to the vector size.
template <typename V, typename T>
inline void store_bytes(T* p, V v, [[maybe_unused]] bool stream = false) {
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
  if (stream && sizeof(V) == 64) return _mm512_stream_si512((__m512i*)p, load_bytes<__m512i>(&v));
#endif
#if defined(BAGUA_SYNCBN_MM)
  if (stream && sizeof(V) == 32) return _mm256_stream_si256((__m256i*)p, load_bytes<__m256i>(&v));
  if (stream && sizeof(V) == 16) return _mm_stream_si128((__m128i*)p, load_bytes<__m128i>(&v));
#endif
  __builtin_memcpy(p, &v, sizeof(v));
}

#if defined(BAGUA_SYNCBN_MM)
// Orders streaming stores before later stores, so that other threads can read the results.
inline void end_streaming() {
  _mm_sfence();
}
#else
inline void end_streaming() {}
#endif

// widen() loads a vector and converts it to the accumulate type. stored() converts it back to the type of its second
// argument.
template <typename T>  // for float and double; the other types have overloads
inline Vec<Accumulate<T>> widen(const T* p) {
  return load_bytes<Vec<Accumulate<T>>>(p);
}
template <typename T>
inline Vec<Accumulate<T>> stored(Vec<Accumulate<T>> v, T) {
  return v;
}

typedef uint16_t Bits16 __attribute__((vector_size(kBytes / 2)));
typedef uint32_t Bits32 __attribute__((vector_size(kBytes)));
typedef long long Integers __attribute__((vector_size(kBytes / 2)));

inline Vec<float> widen(const BFloat16* p) {
  // A bfloat16 is the upper half of a float.
  return (Vec<float>)(__builtin_convertvector(load_bytes<Bits16>(p), Bits32) << 16);
}
inline Bits16 stored(Vec<float> v, BFloat16) {
  const Bits32 bits = (Bits32)v;
  const Bits32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const Bits32 quiet_nan = (bits >> 16) | 0x40;                       // rounding could turn a NaN into infinity
  return __builtin_convertvector(v == v ? rounded : quiet_nan, Bits16);
}

// Sets all bits of the first n lanes.
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

#if defined(BAGUA_SYNCBN_MM)
inline Vec<float> widen(const Half* p) {
  return (Vec<float>)BAGUA_SYNCBN_MM(cvtph_ps)(load_bytes<Integers>(p));
}
inline Bits16 stored(Vec<float> v, Half) {
  return (Bits16)BAGUA_SYNCBN_MM(cvtps_ph)(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Converts bytes to integers as wide as A. Intrinsics, because GCC's __builtin_convertvector goes through memory.
template <int n>
inline __m128i load_low(const uint8_t* p) {
  if constexpr (n == 16) return load_bytes<__m128i>(p);
  if constexpr (n == 8) return _mm_loadl_epi64((const __m128i*)p);
  return _mm_cvtsi32_si128(load_bytes<int32_t>(p));
}
inline LaneMask<float> widen_bytes(const uint8_t* p, float) {
  return (LaneMask<float>)BAGUA_SYNCBN_MM(cvtepu8_epi32)(load_low<kWidth<float>>(p));
}
inline LaneMask<double> widen_bytes(const uint8_t* p, double) {
  return (LaneMask<double>)BAGUA_SYNCBN_MM(cvtepu8_epi64)(load_low<kWidth<double>>(p));
}
#else
// Not inlined: they would make up most of the loops' code.
__attribute__((noinline)) Vec<float> widen(const Half* p) {
  Vec<float> v;
  for (int i = 0; i < kWidth<float>; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(p[i].x);
  return v;
}
__attribute__((noinline)) Bits16 stored(Vec<float> v, Half) {
  Bits16 bits;
  for (int i = 0; i < kWidth<float>; ++i) bits[i] = c10::detail::fp16_ieee_from_fp32_value(v[i]);
  return bits;
}

template <typename A>
inline LaneMask<A> widen_bytes(const uint8_t* p, A) {
  LaneMask<A> lanes;
  for (int i = 0; i < kWidth<A>; ++i) lanes[i] = p[i];
  return lanes;
}
#endif

// Loads the n < kWidth values at p, followed by zeros. For short rows, most of the time is spent here.
template <typename T, typename A = Accumulate<T>>
inline Vec<A> widen_part(const T* p, int64_t n) {
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<A>)_mm512_maskz_loadu_ps((1 << n) - 1, p);
  if constexpr (sizeof(T) == 8) return (Vec<A>)_mm512_maskz_loadu_pd((1 << n) - 1, p);
#elif BAGUA_SYNCBN_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(p, (__m256i)lanes_below<A>(n));
  if constexpr (sizeof(T) == 8) return _mm256_maskload_pd(p, (__m256i)lanes_below<A>(n));
#endif
  T buffer[kWidth<A>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return widen(buffer);
}

template <typename T, typename A = Accumulate<T>>
inline void narrow_part(T* p, Vec<A> v, int64_t n) {
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, (1 << n) - 1, (__m512)v);
  if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(p, (1 << n) - 1, (__m512d)v);
#endif
  T buffer[kWidth<A>];
  store_bytes(buffer, stored(v, T()));
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// Prefetch distance, in values. The hardware prefetcher stops at the end of each 4 KiB page.
constexpr int64_t kAhead = 1024;

// Access to a whole vector, or its first `count` < kWidth lanes.
template <bool kWhole>
struct Access {
  int64_t count = 0;

  template <typename T>
  inline auto load(const T* p) const {
    if constexpr (kWhole) return widen(p);
    if constexpr (!kWhole) return widen_part(p, count);
  }
  template <typename T, typename V>
  inline void store(T* p, V v, bool stream = false) const {
    if constexpr (kWhole) store_bytes(p, stored(v, T()), stream);
    if constexpr (!kWhole) narrow_part(p, v, count);
  }
  template <typename T>
  inline void fetch(const T* p) const {  // to the L2 cache
    __builtin_prefetch(p, 0, 2);
  }
  // If kMasked, zeroes the lanes that have a 0 byte in `valid`.
  template <bool kMasked, typename A>
  inline Vec<A> counted(const uint8_t* valid, Vec<A> v) const {
    if constexpr (!kMasked) return v;
    uint8_t bytes[kWidth<A>] = {};
    for (int64_t i = 0; !kWhole && i < count; ++i) bytes[i] = valid[i];
    return keep<A>(widen_bytes(kWhole ? valid : bytes, A()) != 0, v);
  }
  // Zeroes the lanes that hold no value.
  template <typename A>
  inline Vec<A> only(Vec<A> v) const {
    if constexpr (kWhole) return v;
    return keep<A>(lanes_below<A>(count), v);
  }
};
using Whole = Access<true>;
using Part = Access<false>;
