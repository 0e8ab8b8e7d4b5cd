// Marks functions that CUDA kernels and host code share.
#pragma once

#if defined(__CUDACC__)
#define BAGUA_SYNCBN_HOST_DEVICE __host__ __device__
#else
#define BAGUA_SYNCBN_HOST_DEVICE
#endif
