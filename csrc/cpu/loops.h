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

// Per-channel factors: dx = ((dy - mean_dy) - (x - mean) * projection) * scale.
template <typename A>
struct GradientFactors {
  const A* mean;
  const A* mean_dy;
  const A* projection;
  const A* scale;
  bool stream;
};

// All bits set, or none: of the width of A.
template <typename A>
using LaneBits = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;

// Of the first so many values of a row a value near the mean is made; and where not all of them count.
constexpr int64_t kSample = 256;
constexpr int64_t kMaskedSample = 1024;

template <typename T>
struct Loops {
  using A = Accumulate<T>;

  // Planar: rows of n values of one channel, `stride` apart.
  Moments (*moments)(const T* x, int64_t rows, int64_t n, int64_t stride);
  GradSums (*grad_sums)(const T* dy, const T* x, A mean, int64_t rows, int64_t n, int64_t stride);
  // Planar: contiguous rows of n values; the channel of the first is given, and each row is of the next channel.
  void (*normalize_rows)(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                         NormalizeFactors<A>);
  void (*grad_rows)(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                    GradientFactors<A>);

  // Interleaved: rows of one value for each channel. `columns` is scratch of 3 * channels values; mean and m2, or the
  // two sums, of these rows are written to `out`, 2 * channels values. `list` has the numbers of the rows; or it is
  // null where they follow one another.
  void (*moments_columns)(const T* x, const int64_t* list, int64_t rows, int64_t channels, A* columns, double* out);
  void (*grad_sums_columns)(const T* dy, const T* x, const A* mean, const int64_t* list, int64_t rows, int64_t channels,
                            A* columns, double* out);
  // `valid` has a byte for each row, or is null where all count: y is 0 in rows that do not, and dx is dy * scale
  // there, or 0 if `zeroes`.
  void (*normalize_columns)(const T* x, T* y, const uint8_t* valid, int64_t rows, int64_t channels,
                            NormalizeFactors<A>);
  void (*grad_columns)(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t channels,
                       GradientFactors<A>, bool zeroes);

  // With an activation of z = (x - mean) * scale + shift + residual, which may be null: y = act(z), as normalize_rows
  // and normalize_columns; the sums of g = dy * act'(z), as grad_sums and grad_sums_columns, where g is written too,
  // unless it is null, as it may be if the activation is cheap; and dx of g, of a cheap one without a residual.
  void (*act_rows)(const T* x, const T* residual, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                   NormalizeFactors<A>, Act<A>);
  void (*act_columns)(const T* x, const T* residual, T* y, int64_t rows, int64_t channels, NormalizeFactors<A>, Act<A>);
  GradSums (*act_grad_sums)(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t n, int64_t stride,
                            int64_t channel, NormalizeFactors<A>, Act<A>);
  void (*act_grad_sums_columns)(const T* dy, const T* x, const T* residual, T* g, int64_t rows, int64_t channels,
                                A* columns, double* out, NormalizeFactors<A>, Act<A>);
  void (*act_input_grad_rows)(const T* dy, const T* x, T* dx, int64_t rows, int64_t n, int64_t channel,
                              int64_t channels, GradientFactors<A>, const A* shift, Act<A>);
  void (*act_input_grad_columns)(const T* dy, const T* x, T* dx, int64_t rows, int64_t channels, GradientFactors<A>,
                                 const A* shift, Act<A>);

  // Planar, where not all positions count: see loops/masked.inl. Rows that are added up have masks one after
  // another; those of the element-wise loops have the same.
  Moments (*masked_moments)(const T* x, const uint8_t* valid, int64_t rows, int64_t n, int64_t stride, int64_t sampled,
                            int64_t count);
  GradSums (*masked_grad_sums)(const T* dy, const T* x, A mean, const uint8_t* valid, int64_t rows, int64_t n,
                               int64_t stride);
  void (*masked_normalize_rows)(const T* x, T* y, const uint8_t* valid, int64_t rows, int64_t n, int64_t channel,
                                int64_t channels, NormalizeFactors<A>);
  void (*masked_grad_rows)(const T* dy, const T* x, T* dx, const uint8_t* valid, int64_t rows, int64_t n,
                           int64_t channel, int64_t channels, GradientFactors<A>, bool zeroes);
};

// The loops for the best instruction set of this machine, or the one that BAGUA_SYNCBN_CPU_CAPABILITY names
// ("baseline", "avx2", "avx512") if the machine has it.
template <typename T>
const Loops<T>& loops();

// The name of that instruction set.
const char* cpu_capability();

}  // namespace bagua_syncbn
