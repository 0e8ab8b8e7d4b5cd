// The inner loops for the architecture's baseline instruction set: SSE2 on x86-64, NEON on 64-bit Arm.
#define BAGUA_SYNCBN_ISA baseline
#define BAGUA_SYNCBN_VECTOR_BYTES 16
#include "table.inl"
