// Which positions count: a bool for each, the same for all channels.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../checks.h"
#include "loops.h"

namespace bagua_syncbn::cpu {

inline void check_mask(const Tensor& mask, const Tensor& input) {
  int64_t positions = input.size(0);
  for (int64_t dim = 2; dim < input.dim(); ++dim) positions *= input.size(dim);
  const bool fits = scalar_type(mask) == ScalarType::Bool && mask.numel() == positions && mask.is_contiguous();
  if (!fits) refuse("mask", "a contiguous bool (N, *)", scalar_type(mask), " ", sizes_of(mask));
  check_device(mask, "mask", input);
}

inline bool all(const bool* mask, int64_t n) {
  return n == 0 || std::memchr(mask, 0, n) == nullptr;
}

inline bool none(const bool* mask, int64_t n) {
  return n == 0 || std::memchr(mask, 1, n) == nullptr;
}

// The same as bits of the width of A, and kLanes more, so that vectors can be read beyond the last one.
template <typename A>
std::vector<LaneBits<A>> lanes_of(const bool* mask, int64_t n) {
  std::vector<LaneBits<A>> lanes(n + kLanes);
  for (int64_t j = 0; j < n; ++j) lanes[j] = -static_cast<LaneBits<A>>(mask[j]);
  return lanes;
}

// Positions one after another of which all count, none, or some.
struct Run {
  enum Kind { kAll, kNone, kSome } kind;
  int64_t begin;
  int64_t count;
};

// Cuts `n` positions into runs, at multiples of a block.
inline std::vector<Run> runs_of(const bool* mask, int64_t n) {
  constexpr int64_t kBlock = 64;
  std::vector<Run> runs;
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t count = std::min(kBlock, n - j);
    const Run::Kind kind = all(mask + j, count) ? Run::kAll : none(mask + j, count) ? Run::kNone : Run::kSome;
    if (!runs.empty() && runs.back().kind == kind) {
      runs.back().count += count;
    } else {
      runs.push_back({kind, j, count});
    }
  }
  return runs;
}

}  // namespace bagua_syncbn::cpu
