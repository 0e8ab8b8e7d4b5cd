// Arithmetic on sizes.
#pragma once

#include <cstdint>

namespace bagua_syncbn {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace bagua_syncbn
