// Included by the kernels before all else: parsing it can take longer than compiling one of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>
#include <type_traits>
#include <vector>

#include "emulator.h"
