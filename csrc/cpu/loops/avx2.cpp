// The inner loops for AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#define BAGUA_SYNCBN_ISA avx2
#define BAGUA_SYNCBN_VECTOR_BYTES 32
#define BAGUA_SYNCBN_TARGET "avx2,fma,f16c"
#define BAGUA_SYNCBN_MM(operation) _mm256_##operation
#include "table.inl"
#endif
