// Picks the inner loops for the CPU at run time.
#include "loops.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

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

namespace {

enum Capability { kBaseline, kAvx2, kAvx512 };
constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};

Capability best_capability() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // F16C, which clang cannot query, is present on all CPUs with AVX2.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? kAvx512 : kAvx2;
#else
  return kBaseline;
#endif
}

Capability capability() {
  static const Capability chosen = [] {
    const Capability best = best_capability();
    const char* wanted = std::getenv("BAGUA_SYNCBN_CPU_CAPABILITY");
    for (const Capability lesser : {kBaseline, kAvx2}) {
      if (wanted != nullptr && lesser < best && std::strcmp(wanted, kNames[lesser]) == 0) return lesser;
    }
    return best;
  }();
  return chosen;
}

}  // namespace

template <typename T>
const Loops<T>& loops() {
#if defined(__x86_64__)
  if (capability() == kAvx512) return avx512::table<T>();
  if (capability() == kAvx2) return avx2::table<T>();
#endif
  return baseline::table<T>();
}

#define BAGUA_SYNCBN_INSTANTIATE(name, torch_type, Stored, ...) template const Loops<Stored>& loops<Stored>();
BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_INSTANTIATE)
#undef BAGUA_SYNCBN_INSTANTIATE

const char* cpu_capability() {
  return kNames[capability()];
}

}  // namespace bagua_syncbn
