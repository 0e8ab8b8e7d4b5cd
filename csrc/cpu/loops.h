// The inner loops, on plain memory. They are compiled once for each instruction set; loops() picks one at run time.
//
// All of them give the same bits: a span is added up in kLanes lanes, element j in lane j % kLanes, and without fused
// multiply-adds, whatever the width of the vectors that hold the lanes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../activations.h"
#include "../dtypes.h"
#include "../host_device.h"

namespace bagua_syncbn {

constexpr int kLanes = 64;

// Mean and sum of squared deviations of a number of values.
struct Moments {
  double mean = 0;
  double m2 = 0;
};

struct GradSums {
  double dy = 0;
  double dy_xmu = 0;
};

// z = (x - mean) * scale + shift + residual, with factors for each channel, and the parameter of the activation.
template <typename A>
struct NormalizeFactors {
  const A* mean;
  const A* scale;
  const A* shift;
  A parameter;
  bool stream;  // with streaming stores, see streams() in work.h
};

// dx = ((g - mean_dy) - (x - mean) * projection) * scale, of g = dy * act'(z).
template <typename A>
struct GradientFactors : NormalizeFactors<A> {
  const A* mean_dy;
  const A* projection;
};

// Inlined always, which functions that the loops call have to be: see loops/table.inl.
#define BAGUA_SYNCBN_IN_LOOPS inline __attribute__((always_inline))

// Gradients that backward adds up: g = dy * act'(z), also written to `g` unless that is null. `residual` may be null.
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

// Rows of n values, one after another in memory. Planar: the first is of `channel`, each other one of the next channel.
// Interleaved: n is `channels`, and `channel` 0.
struct Rows {
  int64_t count, n, channel, channels;
};

// The first values of a span, which give a value near the mean: `rows` rows of n values; `count` of these count.
struct Sample {
  int64_t rows, n, count;
};

// The loops of one activation. Elementwise ones come in pairs: planar and interleaved.
template <typename T>
struct ActivatedLoops {
  using A = Accumulate<T>;

  // y = act(z); `residual` may be null.
  void (*normalize[2])(const T* x, const T* residual, T* y, Rows, const NormalizeFactors<A>&);
  // dx, without a residual. `valid`, which only Identity takes, may be null: where it is 0, dx is dy * scale. It has a
  // byte for each value of a row, the same for all rows; interleaved, for each row.
  void (*gradient[2])(const T* dy, const T* x, T* dx, const uint8_t* valid, Rows, const GradientFactors<A>&);
  // Planar: of rows of n values of one channel, `stride` apart.
  GradSums (*sums)(const Gradients<T>&, int64_t rows, int64_t n, int64_t stride, int64_t channel);
  // Interleaved: of rows of one value for each channel. Writes the two sums, [2][channels], to `out`; `columns` is
  // scratch of that size.
  void (*sums_columns)(const Gradients<T>&, int64_t rows, int64_t channels, A* columns, double* out);
};

template <typename T>
struct Loops {
  using A = Accumulate<T>;

  // Planar: of rows of n values of one channel, `stride` apart. `valid` has a byte for each value, row after row, of
  // which `count` are 1 and count; it is null where all do.
  Moments (*moments)(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, const Sample&,
                     int64_t count);
  // Interleaved: of rows of one value for each channel, by their numbers in `list`, or one after another where that is
  // null. Writes mean and m2, [2][channels], to `out`; `columns` is scratch of 3 * channels values.
  void (*moments_columns)(const T* x, const int64_t* list, int64_t rows, int64_t channels, A* columns, double* out);
  ActivatedLoops<T> activated[kActivations];
};

// The loops for the best instruction set of this machine, or the one that BAGUA_SYNCBN_CPU_CAPABILITY names
// ("baseline", "avx2", "avx512") if the machine has it.
template <typename T>
const Loops<T>& loops();

// The name of that instruction set.
const char* cpu_capability();

}  // namespace bagua_syncbn
