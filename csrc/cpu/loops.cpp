// Picks the inner loops for the CPU at run time.
#include "loops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace bagua_syncbn {

#define BAGUA_SYNCBN_DECLARE(isa) \
  namespace isa {                 \
  template <typename T>           \
  const Loops<T>& table();        \
  }
BAGUA_SYNCBN_DECLARE(baseline)
BAGUA_SYNCBN_DECLARE(avx2)
BAGUA_SYNCBN_DECLARE(avx512)
#undef BAGUA_SYNCBN_DECLARE

const char* cpu_capability() {
  static const char* const chosen = [] {
    const char* known[] = {"baseline", "avx2", "avx512"};
    int best = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // F16C, which clang cannot query, is present on all CPUs with AVX2.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      best = 2;
#endif
    const char* wanted = std::getenv("BAGUA_SYNCBN_CPU_CAPABILITY");
    const auto is_wanted = [&](const char* name) { return wanted != nullptr && std::strcmp(name, wanted) == 0; };
    return *std::find_if(known, known + best, is_wanted);
  }();
  return chosen;
}

template <typename T>
const Loops<T>& loops() {
#if defined(__x86_64__)
  static const Loops<T>& chosen = std::strcmp(cpu_capability(), "avx512") == 0 ? avx512::table<T>()
                                  : std::strcmp(cpu_capability(), "avx2") == 0 ? avx2::table<T>()
                                                                               : baseline::table<T>();
  return chosen;
#else
  return baseline::table<T>();
#endif
}

#define BAGUA_SYNCBN_INSTANTIATE(name, type, ...) template const Loops<type>& loops<type>();
BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_INSTANTIATE)
#undef BAGUA_SYNCBN_INSTANTIATE

}  // namespace bagua_syncbn
