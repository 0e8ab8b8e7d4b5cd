// Values as they lie in memory and as they are computed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels.h"
#include "split.h"

namespace bagua_syncbn::cuda {

// Values of type T in a vector.
template <typename T>
constexpr int kVector = kVectorBytes / sizeof(T);

__device__ __forceinline__ float widen(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ float widen(float value) {
  return value;
}
__device__ __forceinline__ double widen(double value) {
  return value;
}

template <typename T>
__device__ __forceinline__ T narrow(Accumulate<T> value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// W values that are loaded and stored at once. They stay in their storage type until all loads of a batch are under
// way: a conversion would wait for its load.
template <typename T, int W>
struct alignas(W * sizeof(T)) Pack {
  T values[W];
};

template <typename T, int W>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, W>& pack) {
  if constexpr (W * sizeof(T) == kVectorBytes) {
    uint4 bits;
    memcpy(&bits, &pack, sizeof(bits));
    *reinterpret_cast<uint4*>(address) = bits;
  } else {
    *address = pack.values[0];
  }
}

template <int kBytes>
struct Unsigned;
template <>
struct Unsigned<2> {
  using type = uint16_t;
};
template <>
struct Unsigned<4> {
  using type = uint32_t;
};
template <>
struct Unsigned<8> {
  using type = uint64_t;
};

// A value of a per-channel tensor as it was loaded. It is converted later, by as(), so that those of several tensors
// are under way together: a conversion waits for its load, and which one it is has to be found out by a branch.
struct ChannelValue {
  uint64_t bits;
  DType dtype;

  template <typename A>
  __device__ __forceinline__ A as() const {
    switch (dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, cpu_type, Stored)                    \
  case DType::k##name: {                                                         \
    const auto own = static_cast<typename Unsigned<sizeof(Stored)>::type>(bits); \
    Stored value;                                                                \
    memcpy(static_cast<void*>(&value), &own, sizeof(value));                     \
    return static_cast<A>(widen(value));                                         \
  }
      BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
    }
    __builtin_unreachable();
  }
};

// Loads value c of a per-channel tensor; nothing if there is none.
__device__ __forceinline__ ChannelValue load_channel(const PerChannel& tensor, int64_t c) {
  uint64_t bits = 0;
  if (tensor.data == nullptr) return {bits, tensor.dtype};
  switch (tensor.dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, cpu_type, Stored)                           \
  case DType::k##name:                                                                  \
    bits = static_cast<const typename Unsigned<sizeof(Stored)>::type*>(tensor.data)[c]; \
    break;
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
  return {bits, tensor.dtype};
}

// Value c of a per-channel tensor, converted at once.
template <typename A>
__device__ __forceinline__ A read_channel(const PerChannel& tensor, int64_t c) {
  switch (tensor.dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, cpu_type, Stored) \
  case DType::k##name:                                        \
    return static_cast<A>(widen(static_cast<const Stored*>(tensor.data)[c]));
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
  __builtin_unreachable();
}

template <typename A>
__device__ __forceinline__ void write_channel(const PerChannel& tensor, int64_t c, A value) {
  switch (tensor.dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, cpu_type, Stored)                                      \
  case DType::k##name:                                                                             \
    static_cast<Stored*>(tensor.data)[c] = narrow<Stored>(static_cast<Accumulate<Stored>>(value)); \
    return;
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
  __builtin_unreachable();
}

// Calls `body(T())` for the type of `dtype`.
template <typename Body>
const char* dispatch(DType dtype, const Body& body) {
  switch (dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, cpu_type, Stored) \
  case DType::k##name:                                        \
    return body(Stored());
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
  __builtin_unreachable();
}

}  // namespace bagua_syncbn::cuda
