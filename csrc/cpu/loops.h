// The inner loops, compiled for each instruction set. loops() picks one at run time.
#pragma once

#include "../activations.h"
#include "../dtypes.h"
#include "../stable_abi.h"

namespace bagua_syncbn {

// Results of a reduction: mean and sum of squared deviations (m2), or sums of g and g * (x - mean).
struct Pair {
  double first = 0;
  double second = 0;
};

// Per-channel factors of z = (x - mean) * scale + shift + residual, and the activation's parameter.
template <typename A>
struct NormalizeFactors {
  const A* mean;
  const A* scale;
  const A* shift;
  A parameter;
  bool stream;  // use streaming stores, see streams() in work.h
};

// Factors of dx = ((g - mean_dy) - (x - mean) * projection) * scale, where g = dy * act'(z).
template <typename A>
struct GradientFactors : NormalizeFactors<A> {
  const A* mean_dy;
  const A* projection;
};

// Required on functions that the loops call, see loops/table.inl.
#define BAGUA_SYNCBN_IN_LOOPS inline __attribute__((always_inline))

// Arguments of the reduction of g = dy * act'(z). `residual` may be null. If `g` is not null, the reduction also stores
// g there.
template <typename T>
struct Gradients {
  const T* dy;
  const T* x;
  const T* residual;
  T* g;
  NormalizeFactors<Accumulate<T>> factors;

  BAGUA_SYNCBN_IN_LOOPS Gradients from(int64_t offset) const {
    return {dy + offset, x + offset, residual ? residual + offset : nullptr, g ? g + offset : nullptr, factors};
  }
};

// Consecutive rows of n values. Planar: the first row belongs to `channel`, the next row to the next channel.
// Interleaved: n is `channels`, and `channel` is 0.
struct Rows {
  int64_t count, n, channel, channels;
};

// The first values of a span, which determine the pivot: `rows` rows with n values each. `count` is the number of valid
// values among them.
struct Sample {
  int64_t rows, n, count;
};

// The loops for one activation. Elementwise loops come in pairs: planar and interleaved.
template <typename T>
struct ActivatedLoops {
  using A = Accumulate<T>;

  // y = act(z); `residual` may be null.
  void (*normalize[2])(const T* x, const T* residual, T* y, Rows, const NormalizeFactors<A>&);
  // dx, without a residual. Where `valid` is 0, dx is dy * scale. Planar: a byte per value, the same for all rows.
  // Interleaved: a byte per row. `valid` is null without a mask, and for activations other than Identity.
  void (*gradient[2])(const T* dy, const T* x, T* dx, const uint8_t* valid, Rows, const GradientFactors<A>&);
  // Planar: one channel, `rows` rows with n values each, `stride` apart.
  Pair (*sums)(const Gradients<T>&, int64_t rows, int64_t n, int64_t stride, int64_t channel);
  // Interleaved: writes per-channel sums, [2][channels], to `out`. `columns` is scratch memory of this size.
  void (*sums_columns)(const Gradients<T>&, int64_t rows, int64_t channels, A* columns, double* out);
};

template <typename T>
struct Loops {
  using A = Accumulate<T>;

  // Planar: one channel, `rows` rows with n values each, `stride` apart. `valid` has a byte per value, `count` of them
  // not 0; null if all values are valid.
  Pair (*moments)(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, const Sample&,
                  int64_t count);
  // Interleaved: writes mean and m2 of each channel, [2][channels], to `out`. `list` has row indices; null for
  // consecutive rows. `columns` is scratch memory for 3 * channels values.
  void (*moments_columns)(const T* x, const int64_t* list, int64_t rows, int64_t channels, A* columns, double* out);
  ActivatedLoops<T> activated[kActivations];
};

// Returns the loops for this CPU's best instruction set, or a lower one set by BAGUA_SYNCBN_CPU_CAPABILITY.
template <typename T>
const Loops<T>& loops();

// Returns the name of the instruction set in use.
const char* cpu_capability();

}  // namespace bagua_syncbn
