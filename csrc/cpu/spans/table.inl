// Implementation of ../spans.h for one instruction set. Included with BAGUA_SYNCBN_ISA, the name of the namespace, and
// BAGUA_SYNCBN_VECTOR_BYTES defined, inside a target pragma. Nothing here may be an inline function of another
// header: the linker would keep one copy of it, perhaps that of an instruction set which the machine lacks.

#ifndef BAGUA_SYNCBN_ISA
#error "table.inl is included by the .cpp files beside it only"
#endif

namespace bagua_syncbn {
namespace BAGUA_SYNCBN_ISA {
namespace {

constexpr int kBytes = BAGUA_SYNCBN_VECTOR_BYTES;

// clang-format off: each stands on the ones before
#include "vectors.inl"
#include "planar.inl"
#include "interleaved.inl"
// clang-format on

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
