// Values as they lie in memory and as they are computed.
#pragma once

#include <type_traits>

#include "launch.cuh"

namespace bagua_syncbn::cuda {

// The type in which values of type T are computed: double for double, float for all others.
template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Values of type T in 16 bytes, the widest load there is on all cards.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

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

template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_pack(const T* address) {
  Pack<T, W> pack;
  if constexpr (W * sizeof(T) == 16) {
    const uint4 bits = *reinterpret_cast<const uint4*>(address);
    memcpy(&pack, &bits, sizeof(bits));
  } else {
    static_assert(W == 1, "one value, or 16 bytes of them");
    pack.values[0] = *address;
  }
  return pack;
}

template <typename T, int W>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, W>& pack) {
  if constexpr (W * sizeof(T) == 16) {
    uint4 bits;
    memcpy(&bits, &pack, sizeof(bits));
    *reinterpret_cast<uint4*>(address) = bits;
  } else {
    *address = pack.values[0];
  }
}

// Value c of a per-channel tensor, converted.
template <typename A>
__device__ __forceinline__ A read_channel(const Channels& channels, int64_t c) {
  switch (channels.dtype) {
    case DType::kHalf:
      return static_cast<A>(widen(static_cast<const __half*>(channels.data)[c]));
    case DType::kBFloat16:
      return static_cast<A>(widen(static_cast<const __nv_bfloat16*>(channels.data)[c]));
    case DType::kFloat:
      return static_cast<A>(static_cast<const float*>(channels.data)[c]);
    default:
      return static_cast<A>(static_cast<const double*>(channels.data)[c]);
  }
}

// Likewise, or `otherwise` if there is none.
template <typename A>
__device__ __forceinline__ A read_channel(const Channels& channels, int64_t c, A otherwise) {
  return channels.data == nullptr ? otherwise : read_channel<A>(channels, c);
}

template <typename A>
__device__ __forceinline__ void write_channel(const Channels& channels, int64_t c, A value) {
  switch (channels.dtype) {
    case DType::kHalf:
      static_cast<__half*>(channels.data)[c] = narrow<__half>(static_cast<float>(value));
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(channels.data)[c] = narrow<__nv_bfloat16>(static_cast<float>(value));
      break;
    case DType::kFloat:
      static_cast<float*>(channels.data)[c] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(channels.data)[c] = static_cast<double>(value);
  }
}

// Calls `body(T())` for the type of `dtype`.
template <typename Body>
const char* dispatch(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(__half());
    case DType::kBFloat16:
      return body(__nv_bfloat16());
    case DType::kFloat:
      return body(float());
    default:
      return body(double());
  }
}

}  // namespace bagua_syncbn::cuda
