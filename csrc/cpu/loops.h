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

// Per-channel factors: y = (x - mean) * scale + shift.
template <typename A>
struct NormalizeFactors {
  const A* mean;
  const A* scale;
  const A* shift;
  bool stream;  // with streaming stores, see streams() in work.h
};

// Per-channel factors: dx = ((g - mean_dy) - (x - mean) * projection) * scale, of g = dy * act'((x - mean) * scale +
// shift).
template <typename A>
struct GradientFactors : NormalizeFactors<A> {
  const A* mean_dy;
  const A* projection;
};

// Inlined always, which functions that the loops call have to be: see loops/table.inl.
#define BAGUA_SYNCBN_IN_LOOPS inline __attribute__((always_inline))

// Follows the normalization: y = act(z), z = (x - mean) * scale + shift + residual, which may be null.
template <typename T>
struct Epilogue {
  const T* residual = nullptr;
  Act<Accumulate<T>> act = {};

  BAGUA_SYNCBN_IN_LOOPS bool is_none() const { return residual == nullptr && act.code == 0; }
  BAGUA_SYNCBN_IN_LOOPS Epilogue from(int64_t offset) const { return {residual ? residual + offset : nullptr, act}; }
};

// Gradients that backward adds up: g = dy * act'(z), also written to `g` unless that is null, as it may be if the
// activation is cheap. Without both, only the means are needed.
template <typename T>
struct Gradients {
  const T* dy;
  const T* x;
  T* g;
  NormalizeFactors<Accumulate<T>> factors;
  Epilogue<T> epilogue;

  BAGUA_SYNCBN_IN_LOOPS bool is_given() const { return g == nullptr && epilogue.act.code == 0; }
  BAGUA_SYNCBN_IN_LOOPS Gradients from(int64_t offset) const {
    return {dy + offset, x + offset, g ? g + offset : nullptr, factors, epilogue.from(offset)};
  }
};

// The first values of a row, so many, give a value near the mean; with a mask, more of them are looked at.
constexpr int64_t kSample = 256;
constexpr int64_t kMaskedSample = 1024;

// `valid` has a byte for each value of a row, or in columns for each row, 1 or 0: what is 0 does not count. It is null
// where all count.
template <typename T>
struct Loops {
  using A = Accumulate<T>;

  // Planar: rows of n values of one channel, `stride` apart, whose bytes follow one another. `count` values count, of
  // which `sampled` are among the first kSample of the first row; with `valid`, among the first kMaskedSample.
  Moments (*moments)(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, int64_t sampled,
                     int64_t count);
  GradSums (*grad_sums)(const Gradients<T>&, int64_t rows, int64_t n, int64_t stride, int64_t channel);
  // Planar: contiguous rows of n values, which all have the same bytes; the channel of the first is given, and each row
  // is of the next channel. Where a value does not count, dx is dy * scale. The activation of grad_rows is cheap, there
  // is no residual, and all values count.
  void (*normalize_rows)(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                         const NormalizeFactors<A>&, const Epilogue<T>&);
  void (*grad_rows)(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t n, int64_t channel,
                    int64_t channels, const GradientFactors<A>&, const Act<A>&);

  // Interleaved: the same of rows of one value for each channel. `columns` is scratch of 3 * channels values; mean and
  // m2, or the two sums, of these rows are written to `out`, 2 * channels values. `list` has the numbers of the rows
  // that count; or it is null where they follow one another.
  void (*moments_columns)(const T* x, const int64_t* list, int64_t rows, int64_t channels, A* columns, double* out);
  void (*grad_sums_columns)(const Gradients<T>&, int64_t rows, int64_t channels, A* columns, double* out);
  void (*normalize_columns)(const T* x, T* y, int64_t rows, int64_t channels, const NormalizeFactors<A>&,
                            const Epilogue<T>&);
  void (*grad_columns)(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t channels,
                       const GradientFactors<A>&, const Act<A>&);
};

// The loops for the best instruction set of this machine, or the one that BAGUA_SYNCBN_CPU_CAPABILITY names
// ("baseline", "avx2", "avx512") if the machine has it.
template <typename T>
const Loops<T>& loops();

// The name of that instruction set.
const char* cpu_capability();

}  // namespace bagua_syncbn
