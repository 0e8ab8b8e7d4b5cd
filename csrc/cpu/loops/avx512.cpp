// The inner loops for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../loops.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif

#define BAGUA_SYNCBN_ISA avx512
#define BAGUA_SYNCBN_VECTOR_BYTES 64
#include "table.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
