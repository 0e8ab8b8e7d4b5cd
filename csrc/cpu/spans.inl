// Implementation of spans.h for one instruction set. Included with BAGUA_SYNCBN_ISA, the name of the namespace, and
// BAGUA_SYNCBN_VECTOR_BYTES defined, inside a target pragma. Nothing here may be an inline function of another
// header: the linker would keep one copy of it, perhaps that of an instruction set which the machine lacks.

#ifndef BAGUA_SYNCBN_ISA
#error "spans.inl is included by the spans_*.cpp only"
#endif

namespace bagua_syncbn {
namespace BAGUA_SYNCBN_ISA {
namespace {

constexpr int kBytes = BAGUA_SYNCBN_VECTOR_BYTES;

// ---- Vectors: GCC's and clang's vector extension, and conversion from and to the storage types. --------------------

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

inline Vec<float> widen(const float* p) { return load_bytes<Vec<float>>(p); }
inline Vec<double> widen(const double* p) { return load_bytes<Vec<double>>(p); }
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
inline Vec<float> widen(const HalfBits* p) { return (Vec<float>)_mm512_cvtph_ps(load_bytes<__m256i>(p)); }
inline Words to_half(Vec<float> v) {
  return (Words)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif BAGUA_SYNCBN_VECTOR_BYTES == 32
inline Vec<float> widen(const HalfBits* p) { return (Vec<float>)_mm256_cvtph_ps(load_bytes<__m128i>(p)); }
inline Words to_half(Vec<float> v) {
  return (Words)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
inline Vec<float> widen(const HalfBits* p) {
  Vec<float> v;
  for (int i = 0; i < kWidth<float>; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(p[i].bits);
  return v;
}
inline Words to_half(Vec<float> v) {
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
inline uint32_t mask_below(int64_t n) { return (1u << n) - 1; }

inline Vec<float> widen_part(const float* p, int64_t n) { return (Vec<float>)_mm512_maskz_loadu_ps(mask_below(n), p); }
inline Vec<double> widen_part(const double* p, int64_t n) {
  return (Vec<double>)_mm512_maskz_loadu_pd(mask_below(n), p);
}
inline void narrow_part(float* p, Vec<float> v, int64_t n) { _mm512_mask_storeu_ps(p, mask_below(n), (__m512)v); }
inline void narrow_part(double* p, Vec<double> v, int64_t n) { _mm512_mask_storeu_pd(p, mask_below(n), (__m512d)v); }
#endif

// Calls body(v, offset) for each vector of the n values of a row, v being the place of its lanes among the kLanes, and
// tail(v, offset, count) for the last count < kWidth values.
template <typename A, typename Body, typename Tail>
inline __attribute__((always_inline)) void for_each_vector(int64_t n, const Body& body, const Tail& tail) {
  constexpr int kVectors = kLanes / kWidth<A>;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) body(v, j + v * kWidth<A>);
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    if (j + kWidth<A> <= n) {
      body(v, j);
      j += kWidth<A>;
    } else {
      if (j < n) tail(v, j, n - j);
      return;
    }
  }
}

// The kLanes lanes of a sum.
template <typename A>
struct Lanes {
  static constexpr int kVectors = kLanes / kWidth<A>;
  Vec<A> part[kVectors] = {};

  // Adds halves to halves, which vectors of any width do in the same order: down to 16 lanes in A, then in double.
  double total() const {
    constexpr int kLast = 16 / kWidth<A> > 0 ? 16 / kWidth<A> : 1;
    Vec<A> folded[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) folded[v] = part[v];
#pragma GCC unroll 4
    for (int half = kVectors / 2; half >= kLast; half /= 2) {
#pragma GCC unroll 16
      for (int v = 0; v < half; ++v) folded[v] += folded[half + v];
    }
    double sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = folded[i / kWidth<A>][i % kWidth<A>];
#pragma GCC unroll 4
    for (int half = 8; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    return sums[0];
  }
};

// ---- Planar --------------------------------------------------------------------------------------------------------

// Where to prefetch while the values at j of a row of n are added up: kAhead values further, in this row or the next.
// The hardware's prefetcher stops at each page of 4 KiB.
constexpr int64_t kAhead = 1024;

struct Ahead {
  int64_t distance, n, to_next_row;
  Ahead(int64_t n, int64_t stride) : distance(n < kAhead ? n : kAhead), n(n), to_next_row(stride - n) {}

  int64_t operator()(int64_t j) const {
    const int64_t target = j + distance;
    return target < n ? target : target + to_next_row;
  }
};

// Sums of deviations from a value near the mean, which need no correction but for how near it is: with the mean of a
// 64th of the values, rounding can grow by a factor of 64 at the very worst, whatever the values are.
constexpr int64_t kSample = 256;

template <typename T>
Moments moments(const T* x, int64_t rows, int64_t n, int64_t stride) {
  using A = Accumulate<T>;
  const int64_t sampled = n < kSample ? n : kSample;
  Lanes<A> sample;
  for_each_vector<A>(
      sampled, [&](int v, int64_t j) { sample.part[v] += widen(x + j); },
      [&](int v, int64_t j, int64_t count) { sample.part[v] += widen_part(x + j, count); });
  const A pivot = static_cast<A>(sample.total() / sampled);
  const Vec<A> pivots = broadcast<A>(pivot);

  const Ahead next(n, stride);
  Lanes<A> deviations, squares;
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    for_each_vector<A>(
        n,
        [&](int v, int64_t j) {
          prefetch(x + next(j));
          const Vec<A> deviation = widen(x + j) - pivots;
          deviations.part[v] += deviation;
          squares.part[v] += deviation * deviation;
        },
        [&](int v, int64_t j, int64_t count) {
          const Vec<A> deviation = keep<A>(lanes_below<A>(count), widen_part(x + j, count) - pivots);
          deviations.part[v] += deviation;
          squares.part[v] += deviation * deviation;
        });
  }
  const double count = static_cast<double>(rows * n);
  const double shift = deviations.total() / count;
  const double m2 = squares.total() - shift * shift * count;
  return {pivot + shift, m2 < 0 ? 0 : m2};
}

template <typename T, typename A = Accumulate<T>>
GradSums grad_sums(const T* dy, const T* x, A mean, int64_t rows, int64_t n, int64_t stride) {
  const Vec<A> means = broadcast<A>(mean);
  const Ahead next(n, stride);
  Lanes<A> sum_dy, sum_dy_xmu;
  for (int64_t row = 0; row < rows; ++row, x += stride, dy += stride) {
    for_each_vector<A>(
        n,
        [&](int v, int64_t j) {
          prefetch(dy + next(j));
          prefetch(x + next(j));
          const Vec<A> grad = widen(dy + j);
          sum_dy.part[v] += grad;
          sum_dy_xmu.part[v] += grad * (widen(x + j) - means);
        },
        [&](int v, int64_t j, int64_t count) {
          // dy is 0 beyond the row, but an infinite mean would make that a NaN.
          const Vec<A> grad = widen_part(dy + j, count);
          const Vec<A> deviation = keep<A>(lanes_below<A>(count), widen_part(x + j, count) - means);
          sum_dy.part[v] += grad;
          sum_dy_xmu.part[v] += grad * deviation;
        });
  }
  return {sum_dy.total(), sum_dy_xmu.total()};
}

template <bool kStream, typename T, typename A>
void normalize_rows_to(
    const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels, const Affine<A>& affine) {
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    const Vec<A> mean = broadcast<A>(affine.mean[channel]);
    const Vec<A> scale = broadcast<A>(affine.scale[channel]);
    const Vec<A> shift = broadcast<A>(affine.shift[channel]);
    for_each_vector<A>(
        n,
        [&](int, int64_t j) {
          prefetch(x + j + kAhead);
          narrow<kStream>(y + j, (widen(x + j) - mean) * scale + shift);
        },
        [&](int, int64_t j, int64_t count) {
          narrow_part(y + j, (widen_part(x + j, count) - mean) * scale + shift, count);
        });
    if (++channel == channels) channel = 0;
  }
}

template <typename T, typename A = Accumulate<T>>
void normalize_rows(
    const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels, Affine<A> affine) {
  if (!affine.stream) return normalize_rows_to<false>(x, y, rows, n, channel, channels, affine);
  normalize_rows_to<true>(x, y, rows, n, channel, channels, affine);
  end_streaming();
}

template <bool kStream, typename T, typename A>
void grad_rows_to(
    const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
    const GradAffine<A>& affine) {
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
    const Vec<A> mean = broadcast<A>(affine.mean[channel]);
    const Vec<A> mean_dy = broadcast<A>(affine.mean_dy[channel]);
    const Vec<A> projection = broadcast<A>(affine.projection[channel]);
    const Vec<A> scale = broadcast<A>(affine.scale[channel]);
    for_each_vector<A>(
        n,
        [&](int, int64_t j) {
          prefetch(dy + j + kAhead);
          prefetch(x + j + kAhead);
          const Vec<A> projected = (widen(x + j) - mean) * projection;
          narrow<kStream>(dx + j, ((widen(dy + j) - mean_dy) - projected) * scale);
        },
        [&](int, int64_t j, int64_t count) {
          const Vec<A> projected = (widen_part(x + j, count) - mean) * projection;
          narrow_part(dx + j, ((widen_part(dy + j, count) - mean_dy) - projected) * scale, count);
        });
    if (++channel == channels) channel = 0;
  }
}

template <typename T, typename A = Accumulate<T>>
void grad_rows(
    const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
    GradAffine<A> affine) {
  if (!affine.stream) return grad_rows_to<false>(dy, x, dx, rows, n, channel, channels, affine);
  grad_rows_to<true>(dy, x, dx, rows, n, channel, channels, affine);
  end_streaming();
}

// ---- Interleaved ---------------------------------------------------------------------------------------------------

// Calls body(width, j, load, store) for the columns of a row: kBlock vectors at a time, whose sums stay in registers,
// then one at a time, then a part of one. `width` is the number of vectors, as a type.
constexpr int kBlock = kBytes == 64 ? 4 : 2;

template <int n>
struct Width {
  static constexpr int value = n;
};

template <typename A, typename Body>
inline __attribute__((always_inline)) void for_each_block(int64_t channels, const Body& body) {
  const auto load = [](const auto* p) { return widen(p); };
  const auto store = [](auto* p, Vec<A> v) { narrow(p, v); };
  int64_t j = 0;
  for (; j + kBlock * kWidth<A> <= channels; j += kBlock * kWidth<A>) body(Width<kBlock>(), j, load, store);
  for (; j + kWidth<A> <= channels; j += kWidth<A>) body(Width<1>(), j, load, store);
  if (j == channels) return;
  const int64_t rest = channels - j;
  body(Width<1>(), j, [=](const auto* p) { return widen_part(p, rest); },
       [=](auto* p, Vec<A> v) { narrow_part(p, v, rest); });
}

// Sums are read from and written to memory once in kGroup rows. Few rows, so that they are read nearly in the order in
// which they lie: going down a long column takes half as long again.
constexpr int64_t kGroup = 8;

template <typename Body>
inline __attribute__((always_inline)) void for_each_group(int64_t rows, const Body& body) {
  for (int64_t row = 0; row < rows; row += kGroup) body(row, row + kGroup < rows ? row + kGroup : rows);
}

// How far ahead to prefetch in rows of `channels` values.
inline int64_t group_ahead(int64_t channels) {
  return kGroup * channels > kAhead ? kGroup * channels : kAhead;
}

template <typename T>
void moments_columns(const T* x, int64_t rows, int64_t channels, Accumulate<T>* columns, double* out) {
  using A = Accumulate<T>;
  A* const pivots = columns;
  A* const deviations = columns + channels;
  A* const squares = columns + 2 * channels;
  const int64_t ahead = group_ahead(channels);
  // The pivots are the means of the first group.
  const int64_t sampled = rows < kGroup ? rows : kGroup;
  for_each_block<A>(channels, [&](auto width, int64_t j, auto load, auto store) {
    for (int v = 0; v < decltype(width)::value; ++v) {
      const int64_t column = j + v * kWidth<A>;
      Vec<A> sum = {};
      for (int64_t row = 0; row < sampled; ++row) sum += load(x + row * channels + column);
      store(pivots + column, sum / static_cast<A>(sampled));
      store(deviations + column, Vec<A>{});
      store(squares + column, Vec<A>{});
    }
  });
  for_each_group(rows, [&](int64_t begin, int64_t end) {
    for_each_block<A>(channels, [&](auto width, int64_t j, auto load, auto store) {
      constexpr int kVectors = decltype(width)::value;
      Vec<A> pivot[kVectors], deviation_sum[kVectors], square_sum[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        pivot[v] = load(pivots + j + v * kWidth<A>);
        deviation_sum[v] = load(deviations + j + v * kWidth<A>);
        square_sum[v] = load(squares + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const T* p = x + row * channels + j + v * kWidth<A>;
          prefetch(p + ahead);
          const Vec<A> deviation = load(p) - pivot[v];
          deviation_sum[v] += deviation;
          square_sum[v] += deviation * deviation;
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(deviations + j + v * kWidth<A>, deviation_sum[v]);
        store(squares + j + v * kWidth<A>, square_sum[v]);
      }
    });
  });

  const double count = static_cast<double>(rows), inverse = 1 / count;
  for (int64_t c = 0; c < channels; ++c) {
    const double shift = deviations[c] * inverse;
    const double m2 = squares[c] - shift * shift * count;
    out[c] = pivots[c] + shift;
    out[channels + c] = m2 < 0 ? 0 : m2;
  }
}

template <typename T, typename A = Accumulate<T>>
void grad_sums_columns(
    const T* dy, const T* x, const A* mean, int64_t rows, int64_t channels, A* columns, double* out) {
  A* const dy_sums = columns;
  A* const dy_xmu_sums = columns + channels;
  const int64_t ahead = group_ahead(channels);
  for (int64_t c = 0; c < 2 * channels; ++c) columns[c] = 0;
  for_each_group(rows, [&](int64_t begin, int64_t end) {
    for_each_block<A>(channels, [&](auto width, int64_t j, auto load, auto store) {
      constexpr int kVectors = decltype(width)::value;
      Vec<A> means[kVectors], sum_dy[kVectors], sum_dy_xmu[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        means[v] = load(mean + j + v * kWidth<A>);
        sum_dy[v] = load(dy_sums + j + v * kWidth<A>);
        sum_dy_xmu[v] = load(dy_xmu_sums + j + v * kWidth<A>);
      }
      for (int64_t row = begin; row < end; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t offset = row * channels + j + v * kWidth<A>;
          prefetch(dy + offset + ahead);
          prefetch(x + offset + ahead);
          const Vec<A> grad = load(dy + offset);
          sum_dy[v] += grad;
          sum_dy_xmu[v] += grad * (load(x + offset) - means[v]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(dy_sums + j + v * kWidth<A>, sum_dy[v]);
        store(dy_xmu_sums + j + v * kWidth<A>, sum_dy_xmu[v]);
      }
    });
  });
  for (int64_t c = 0; c < 2 * channels; ++c) out[c] = columns[c];
}

// The vectors of a row: body(j) for each, and tail(j, count) for the last count < kWidth values. Row by row: going down
// a block of columns would read and write memory in pieces, at half the speed.
template <typename A, typename Body, typename Tail>
inline __attribute__((always_inline)) void for_each_column(int64_t channels, const Body& body, const Tail& tail) {
  int64_t j = 0;
#pragma GCC unroll 4
  for (; j + kWidth<A> <= channels; j += kWidth<A>) body(j);
  if (j < channels) tail(j, channels - j);
}

template <bool kStream, typename T, typename A>
void normalize_columns_to(const T* x, T* y, int64_t rows, int64_t channels, const Affine<A>& affine) {
  const A *const mean = affine.mean, *const scale = affine.scale, *const shift = affine.shift;
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    for_each_column<A>(
        channels,
        [=](int64_t j) {
          prefetch(x + j + kAhead);
          narrow<kStream>(y + j, (widen(x + j) - widen(mean + j)) * widen(scale + j) + widen(shift + j));
        },
        [=](int64_t j, int64_t count) {
          const Vec<A> scaled = (widen_part(x + j, count) - widen_part(mean + j, count)) * widen_part(scale + j, count);
          narrow_part(y + j, scaled + widen_part(shift + j, count), count);
        });
  }
}

template <typename T, typename A = Accumulate<T>>
void normalize_columns(const T* x, T* y, int64_t rows, int64_t channels, Affine<A> affine) {
  if (!affine.stream) return normalize_columns_to<false>(x, y, rows, channels, affine);
  normalize_columns_to<true>(x, y, rows, channels, affine);
  end_streaming();
}

template <bool kStream, typename T, typename A>
void grad_columns_to(const T* dy, const T* x, T* dx, int64_t rows, int64_t channels, const GradAffine<A>& affine) {
  const A *const mean = affine.mean, *const mean_dy = affine.mean_dy;
  const A *const projection = affine.projection, *const scale = affine.scale;
  for (int64_t row = 0; row < rows; ++row, dy += channels, x += channels, dx += channels) {
    for_each_column<A>(
        channels,
        [=](int64_t j) {
          prefetch(dy + j + kAhead);
          prefetch(x + j + kAhead);
          const Vec<A> projected = (widen(x + j) - widen(mean + j)) * widen(projection + j);
          narrow<kStream>(dx + j, ((widen(dy + j) - widen(mean_dy + j)) - projected) * widen(scale + j));
        },
        [=](int64_t j, int64_t count) {
          const Vec<A> deviation = widen_part(x + j, count) - widen_part(mean + j, count);
          const Vec<A> centered = widen_part(dy + j, count) - widen_part(mean_dy + j, count);
          const Vec<A> gradient = centered - deviation * widen_part(projection + j, count);
          narrow_part(dx + j, gradient * widen_part(scale + j, count), count);
        });
  }
}

template <typename T, typename A = Accumulate<T>>
void grad_columns(const T* dy, const T* x, T* dx, int64_t rows, int64_t channels, GradAffine<A> affine) {
  if (!affine.stream) return grad_columns_to<false>(dy, x, dx, rows, channels, affine);
  grad_columns_to<true>(dy, x, dx, rows, channels, affine);
  end_streaming();
}

}  // namespace

template <typename T>
const Spans<T>& table() {
  static constexpr Spans<T> loops = {
      moments<T>,         grad_sums<T>,         normalize_rows<T>,    grad_rows<T>,
      moments_columns<T>, grad_sums_columns<T>, normalize_columns<T>, grad_columns<T>,
  };
  return loops;
}

template const Spans<float>& table<float>();
template const Spans<double>& table<double>();
template const Spans<HalfBits>& table<HalfBits>();
template const Spans<BFloat16Bits>& table<BFloat16Bits>();

}  // namespace BAGUA_SYNCBN_ISA
}  // namespace bagua_syncbn
