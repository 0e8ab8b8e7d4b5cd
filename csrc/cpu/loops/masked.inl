// Planar, where not all values of a row count: those whose `lanes` have all bits set do.

template <typename A>
inline Mask<A> lanes_at(const LaneBits<A>* lanes) {
  return load_bytes<Mask<A>>(lanes);
}

// Moments of the `count` values that count, of which `sampled` are among the first kSample: a 64th, as in moments.
template <typename T, typename A = Accumulate<T>>
Moments masked_moments(const T* x, const LaneBits<A>* lanes, int64_t n, int64_t sampled, int64_t count) {
  Lanes<A> sample;
  for_each_vector<A>(
      n < kSample ? n : kSample,
      [&](int v, int64_t j) { sample.part[v] += keep<A>(lanes_at<A>(lanes + j), widen(x + j)); },
      [&](int v, int64_t j, int64_t rest) {
        sample.part[v] += keep<A>(lanes_at<A>(lanes + j) & lanes_below<A>(rest), widen_part(x + j, rest));
      });
  const A pivot = static_cast<A>(sample.total() / sampled);
  const Vec<A> pivots = broadcast<A>(pivot);
  Lanes<A> deviations, squares;
  for_each_vector<A>(
      n,
      [&](int v, int64_t j) {
        prefetch(x + j + kAhead);
        const Vec<A> deviation = keep<A>(lanes_at<A>(lanes + j), widen(x + j) - pivots);
        deviations.part[v] += deviation;
        squares.part[v] += deviation * deviation;
      },
      [&](int v, int64_t j, int64_t rest) {
        const Mask<A> mask = lanes_at<A>(lanes + j) & lanes_below<A>(rest);
        const Vec<A> deviation = keep<A>(mask, widen_part(x + j, rest) - pivots);
        deviations.part[v] += deviation;
        squares.part[v] += deviation * deviation;
      });
  const double shift = deviations.total() / static_cast<double>(count);
  const double m2 = squares.total() - shift * shift * static_cast<double>(count);
  return {pivot + shift, m2 < 0 ? 0 : m2};
}

// A row of one channel: dx = ((dy - mean_dy) - (x - mean) * projection) * scale where a value counts, else dy * scale.
template <typename T, typename A = Accumulate<T>>
void masked_grad_row(const T* dy, const T* x, T* dx, const LaneBits<A>* lanes, int64_t n, int64_t channel,
                     GradientFactors<A> factors) {
  const Vec<A> mean = broadcast<A>(factors.mean[channel]);
  const Vec<A> mean_dy = broadcast<A>(factors.mean_dy[channel]);
  const Vec<A> projection = broadcast<A>(factors.projection[channel]);
  const Vec<A> scale = broadcast<A>(factors.scale[channel]);
  const auto gradient = [&](Mask<A> mask, Vec<A> grad, Vec<A> value) {
    return ((grad - keep<A>(mask, mean_dy)) - keep<A>(mask, (value - mean) * projection)) * scale;
  };
  for_each_vector<A>(
      n,
      [&](int, int64_t j) {
        prefetch(dy + j + kAhead);
        prefetch(x + j + kAhead);
        narrow<false>(dx + j, gradient(lanes_at<A>(lanes + j), widen(dy + j), widen(x + j)));
      },
      [&](int, int64_t j, int64_t rest) {
        narrow_part(dx + j, gradient(lanes_at<A>(lanes + j), widen_part(dy + j, rest), widen_part(x + j, rest)), rest);
      });
}
