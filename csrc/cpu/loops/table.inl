// Implementation of ../loops.h for one instruction set. Included with BAGUA_SYNCBN_ISA, the name of the namespace, and
// BAGUA_SYNCBN_VECTOR_BYTES defined, inside a target pragma. Functions of other headers that are called here must
// always be inlined: the linker would keep one copy, perhaps compiled for an instruction set that the machine lacks.

#ifndef BAGUA_SYNCBN_ISA
#error "table.inl is included by the .cpp files beside it only"
#endif

namespace bagua_syncbn {
namespace BAGUA_SYNCBN_ISA {
namespace {

constexpr int kBytes = BAGUA_SYNCBN_VECTOR_BYTES;

// clang-format off: each stands on the ones before
#include "vectors.inl"
#include "math.inl"
#define BAGUA_SYNCBN_FORMULAS
#include "../../activations.h"
#include "elementwise.inl"
#include "planar.inl"
#include "interleaved.inl"
// clang-format on

}  // namespace

template <typename T>
const Loops<T>& table() {
#define BAGUA_SYNCBN_ACTIVATED(name)                      \
  {{normalize<name, false, T>, normalize<name, true, T>}, \
   {gradient<name, false, T>, gradient<name, true, T>},   \
   grad_sums<name, T>,                                    \
   grad_sums_columns<name, T>},
  static constexpr Loops<T> loops = {
      moments<T>, moments_columns<T>, {BAGUA_SYNCBN_ACTIVATIONS(BAGUA_SYNCBN_ACTIVATED)}};
#undef BAGUA_SYNCBN_ACTIVATED
  return loops;
}

#define BAGUA_SYNCBN_INSTANTIATE(name, torch_type, Stored, ...) template const Loops<Stored>& table<Stored>();
BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_INSTANTIATE)
#undef BAGUA_SYNCBN_INSTANTIATE

}  // namespace BAGUA_SYNCBN_ISA
}  // namespace bagua_syncbn
