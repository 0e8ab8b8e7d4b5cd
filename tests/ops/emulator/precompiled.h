// A precompiled header for all kernels, because parsing these headers can take longer than compiling a kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>
#include <type_traits>
#include <vector>

#include "emulator.h"
