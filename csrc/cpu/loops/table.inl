// Implements ../loops.h for one instruction set. The including file defines
//
//   BAGUA_SYNCBN_ISA           namespace
//   BAGUA_SYNCBN_VECTOR_BYTES  vector size
//   BAGUA_SYNCBN_TARGET        options for the compiler's target pragma; not in the baseline
//   BAGUA_SYNCBN_MM(op)        x86 intrinsic for whole vectors; not in the baseline
//
// Functions from other headers must always be inlined in these files. Otherwise, the linker might keep only a copy that
// uses instructions the CPU lacks.
#include "../loops.h"

#define BAGUA_SYNCBN_PRAGMA_OF(...) _Pragma(#__VA_ARGS__)
#define BAGUA_SYNCBN_PRAGMA(...) BAGUA_SYNCBN_PRAGMA_OF(__VA_ARGS__)
#if defined(BAGUA_SYNCBN_TARGET) && defined(__clang__)
BAGUA_SYNCBN_PRAGMA(clang attribute push(__attribute__((target(BAGUA_SYNCBN_TARGET))), apply_to = function))
#elif defined(BAGUA_SYNCBN_TARGET)
BAGUA_SYNCBN_PRAGMA(GCC target(BAGUA_SYNCBN_TARGET))
#endif

namespace bagua_syncbn {
namespace BAGUA_SYNCBN_ISA {
namespace {

constexpr int kBytes = BAGUA_SYNCBN_VECTOR_BYTES;

// clang-format off: each file uses the files before it
#include "vectors.inl"
#include "math.inl"
BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_ACTIVATION)
#include "elementwise.inl"
#include "planar.inl"
#include "interleaved.inl"
// clang-format on

}  // namespace

template <typename T>
const Loops<T>& table() {
#define BAGUA_SYNCBN_ACTIVATED(name, ...)                 \
  {{normalize<name, false, T>, normalize<name, true, T>}, \
   {gradient<name, false, T>, gradient<name, true, T>},   \
   grad_sums<name, T>,                                    \
   grad_sums_columns<name, T>},
  static constexpr Loops<T> loops = {
      moments<T>, moments_columns<T>, {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_ACTIVATED)}};
#undef BAGUA_SYNCBN_ACTIVATED
  return loops;
}

#define BAGUA_SYNCBN_INSTANTIATE(name, type, ...) template const Loops<type>& table<type>();
BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_INSTANTIATE)
#undef BAGUA_SYNCBN_INSTANTIATE

}  // namespace BAGUA_SYNCBN_ISA
}  // namespace bagua_syncbn

#if defined(BAGUA_SYNCBN_TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
