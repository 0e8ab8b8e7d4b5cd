// The inner loops for AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../loops.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define BAGUA_SYNCBN_ISA avx2
#define BAGUA_SYNCBN_VECTOR_BYTES 32
#include "table.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
