// Where values are read, written and counted: a vector of them, whole or in part; and of those that count.

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
  template <typename A>
  inline LaneMask<A> lanes(const uint8_t* valid) const;
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
  template <typename A>
  inline LaneMask<A> lanes(const uint8_t* valid) const;
};

// As integers of the width of A; `_part`, n < kWidth of them, and zeros. What GCC makes of its own conversion goes
// through memory.
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
inline LaneMask<float> widen_bytes(const uint8_t* p, float) {
  return (LaneMask<float>)_mm512_cvtepu8_epi32(load_bytes<__m128i>(p));
}
inline LaneMask<double> widen_bytes(const uint8_t* p, double) {
  return (LaneMask<double>)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
}
inline LaneMask<float> widen_bytes_part(const uint8_t* p, int64_t n, float) {
  return (LaneMask<float>)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask_below(n), p));
}
inline LaneMask<double> widen_bytes_part(const uint8_t* p, int64_t n, double) {
  return (LaneMask<double>)_mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(mask_below(n), p));
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
#if BAGUA_SYNCBN_VECTOR_BYTES < 64
template <typename A>
inline LaneMask<A> widen_bytes_part(const uint8_t* p, int64_t n, A) {
  uint8_t buffer[kWidth<A>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return widen_bytes(buffer, A());
}
#endif

// All bits set where a position counts.
template <typename A>
inline LaneMask<A> lanes_at(const uint8_t* valid) {
  return -widen_bytes(valid, A());
}

// All bits set where one of n < kWidth positions counts.
template <typename A>
inline LaneMask<A> lanes_part(const uint8_t* valid, int64_t n) {
  return -widen_bytes_part(valid, n, A());
}

template <typename A>
inline LaneMask<A> Whole::lanes(const uint8_t* valid) const {
  return lanes_at<A>(valid);
}
template <typename A>
inline LaneMask<A> Part::lanes(const uint8_t* valid) const {
  return lanes_part<A>(valid, count);
}

// All values count.
template <typename A>
struct Everywhere {
  static constexpr bool skips(int64_t) { return false; }
  template <typename Access>
  static inline Vec<A> counted(const Access&, Vec<A> v, int64_t) {
    return v;
  }
};

// Rows of positions of which some count: `valid` has a byte for each, 1 or 0.
template <typename A>
struct AtPositions {
  const uint8_t* valid;
  explicit AtPositions(const uint8_t* valid) : valid(valid) {}
  static constexpr bool skips(int64_t) { return false; }
  // Zeros where the position does not count.
  template <typename Access>
  inline Vec<A> counted(const Access& access, Vec<A> v, int64_t position) const {
    return keep<A>(access.template lanes<A>(valid + position), v);
  }
};

// Rows of which some count: `valid` has a byte for each, or is null where all do.
template <typename A>
struct AtRows : Everywhere<A> {
  const uint8_t* valid;
  explicit AtRows(const uint8_t* valid) : valid(valid) {}
  inline bool skips(int64_t row) const { return valid != nullptr && !valid[row]; }
};
