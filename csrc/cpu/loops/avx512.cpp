// The inner loops for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#define BAGUA_SYNCBN_ISA avx512
#define BAGUA_SYNCBN_VECTOR_BYTES 64
#define BAGUA_SYNCBN_TARGET "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"
#define BAGUA_SYNCBN_MM(operation) _mm512_##operation
#include "table.inl"
#endif
