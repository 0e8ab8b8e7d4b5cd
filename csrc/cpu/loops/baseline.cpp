// The inner loops for instructions that every CPU of the architecture has: SSE2 on x86-64, NEON on 64-bit Arm.
#include "../../stable_abi.h"

#define BAGUA_SYNCBN_ISA baseline
#define BAGUA_SYNCBN_VECTOR_BYTES 16
#include "table.inl"
