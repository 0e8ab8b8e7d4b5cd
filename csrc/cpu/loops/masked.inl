// Where not all positions count: `valid` has a byte for each, 1 or 0, the same for all channels.

// As integers of the width of A; `_part`, n < kWidth of them, and zeros. What GCC makes of its own conversion goes
// through memory.
#if BAGUA_SYNCBN_VECTOR_BYTES == 64
inline Mask<float> widen_bytes(const uint8_t* p, float) {
  return (Mask<float>)_mm512_cvtepu8_epi32(load_bytes<__m128i>(p));
}
inline Mask<double> widen_bytes(const uint8_t* p, double) {
  return (Mask<double>)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
}
inline Mask<float> widen_bytes_part(const uint8_t* p, int64_t n, float) {
  return (Mask<float>)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask_below(n), p));
}
inline Mask<double> widen_bytes_part(const uint8_t* p, int64_t n, double) {
  return (Mask<double>)_mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(mask_below(n), p));
}
#elif BAGUA_SYNCBN_VECTOR_BYTES == 32
inline Mask<float> widen_bytes(const uint8_t* p, float) {
  return (Mask<float>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline Mask<double> widen_bytes(const uint8_t* p, double) {
  return (Mask<double>)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_bytes<int32_t>(p)));
}
#else
template <typename A>
inline Mask<A> widen_bytes(const uint8_t* p, A) {
  Mask<A> lanes;
  for (int i = 0; i < kWidth<A>; ++i) lanes[i] = p[i];
  return lanes;
}
#endif
#if BAGUA_SYNCBN_VECTOR_BYTES < 64
template <typename A>
inline Mask<A> widen_bytes_part(const uint8_t* p, int64_t n, A) {
  uint8_t buffer[kWidth<A>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return widen_bytes(buffer, A());
}
#endif

// All bits set where a position counts.
template <typename A>
inline Mask<A> lanes_at(const uint8_t* valid) {
  return -widen_bytes(valid, A());
}

// The same of n < kWidth positions, and no bits.
template <typename A>
inline Mask<A> lanes_part(const uint8_t* valid, int64_t n) {
  return -widen_bytes_part(valid, n, A());
}

// Moments of the `count` values that count, of which `sampled` are among the first kMaskedSample of the first row: a
// 64th, as in moments.
template <typename T, typename A = Accumulate<T>>
Moments masked_moments(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, int64_t sampled,
                       int64_t count) {
  Lanes<A> sample;
  for_each_vector<A>(
      n < kMaskedSample ? n : kMaskedSample,
      [&](int v, int64_t j) { sample.part[v] += keep<A>(lanes_at<A>(valid + j), widen(x + j)); },
      [&](int v, int64_t j, int64_t rest) {
        sample.part[v] += keep<A>(lanes_part<A>(valid + j, rest), widen_part(x + j, rest));
      });
  const A pivot = static_cast<A>(sample.total() / sampled);
  const Vec<A> pivots = broadcast<A>(pivot);
  const Ahead next(n, stride);
  Lanes<A> deviations, squares;
  const auto add = [&](int v, Mask<A> lanes, Vec<A> value) {
    const Vec<A> deviation = keep<A>(lanes, value - pivots);
    deviations.part[v] += deviation;
    squares.part[v] += deviation * deviation;
  };
  for (int64_t row = 0; row < rows; ++row, x += stride, valid += n) {
    for_each_vector<A>(
        n,
        [&](int v, int64_t j) {
          prefetch(x + next(j));
          add(v, lanes_at<A>(valid + j), widen(x + j));
        },
        [&](int v, int64_t j, int64_t rest) { add(v, lanes_part<A>(valid + j, rest), widen_part(x + j, rest)); });
  }
  const double shift = deviations.total() / static_cast<double>(count);
  const double m2 = squares.total() - shift * shift * static_cast<double>(count);
  return {pivot + shift, m2 < 0 ? 0 : m2};
}

template <typename T, typename A = Accumulate<T>>
GradSums masked_grad_sums(const T* dy, const T* x, A mean, const uint8_t* valid, int64_t rows, int64_t n,
                          int64_t stride) {
  const Vec<A> means = broadcast<A>(mean);
  const Ahead next(n, stride);
  Lanes<A> sum_dy, sum_dy_xmu;
  for (int64_t row = 0; row < rows; ++row, x += stride, dy += stride, valid += n) {
    const auto add = [&](int v, Mask<A> lanes, Vec<A> grad, Vec<A> value) {
      sum_dy.part[v] += keep<A>(lanes, grad);
      sum_dy_xmu.part[v] += keep<A>(lanes, grad * (value - means));
    };
    for_each_vector<A>(
        n,
        [&](int v, int64_t j) {
          prefetch(dy + next(j));
          prefetch(x + next(j));
          add(v, lanes_at<A>(valid + j), widen(dy + j), widen(x + j));
        },
        [&](int v, int64_t j, int64_t rest) {
          add(v, lanes_part<A>(valid + j, rest), widen_part(dy + j, rest), widen_part(x + j, rest));
        });
  }
  return {sum_dy.total(), sum_dy_xmu.total()};
}

// y is 0 where a position does not count.
template <typename T, typename A = Accumulate<T>>
void masked_normalize_rows(const T* x, T* y, const uint8_t* valid, int64_t rows, int64_t n, int64_t channel,
                           int64_t channels, NormalizeFactors<A> factors) {
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    const Vec<A> mean = broadcast<A>(factors.mean[channel]);
    const Vec<A> scale = broadcast<A>(factors.scale[channel]);
    const Vec<A> shift = broadcast<A>(factors.shift[channel]);
    for_each_vector<A>(
        n,
        [&](int, int64_t j) {
          prefetch(x + j + kAhead);
          narrow<false>(y + j, keep<A>(lanes_at<A>(valid + j), (widen(x + j) - mean) * scale + shift));
        },
        [&](int, int64_t j, int64_t rest) {
          const Vec<A> output = (widen_part(x + j, rest) - mean) * scale + shift;
          narrow_part(y + j, keep<A>(lanes_part<A>(valid + j, rest), output), rest);
        });
    if (++channel == channels) channel = 0;
  }
}

// dx = ((dy - mean_dy) - (x - mean) * projection) * scale where a position counts; else dy * scale, or 0 if `zeroes`.
template <typename T, typename A = Accumulate<T>>
void masked_grad_rows(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t n, int64_t channel,
                      int64_t channels, GradientFactors<A> factors, bool zeroes) {
  const Mask<A> outside = Mask<A>{} - static_cast<LaneBits<A>>(!zeroes);
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
    const Vec<A> mean = broadcast<A>(factors.mean[channel]);
    const Vec<A> mean_dy = broadcast<A>(factors.mean_dy[channel]);
    const Vec<A> projection = broadcast<A>(factors.projection[channel]);
    const Vec<A> scale = broadcast<A>(factors.scale[channel]);
    const auto gradient = [&](Mask<A> lanes, Vec<A> grad, Vec<A> value) {
      grad = keep<A>(lanes | outside, grad);
      return ((grad - keep<A>(lanes, mean_dy)) - keep<A>(lanes, (value - mean) * projection)) * scale;
    };
    for_each_vector<A>(
        n,
        [&](int, int64_t j) {
          prefetch(dy + j + kAhead);
          prefetch(x + j + kAhead);
          narrow<false>(dx + j, gradient(lanes_at<A>(valid + j), widen(dy + j), widen(x + j)));
        },
        [&](int, int64_t j, int64_t rest) {
          const Mask<A> lanes = lanes_part<A>(valid + j, rest);
          narrow_part(dx + j, gradient(lanes, widen_part(dy + j, rest), widen_part(x + j, rest)), rest);
        });
    if (++channel == channels) channel = 0;
  }
}
