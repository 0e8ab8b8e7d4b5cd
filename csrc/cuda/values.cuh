// Values as they lie in memory and as they are computed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels.h"
#include "split.h"

namespace bagua_syncbn::cuda {

__device__ __forceinline__ float widen(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <typename A>
__device__ __forceinline__ A widen(A value) {
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

// Values of type T in a vector.
template <typename T>
constexpr int kVector = static_cast<int>(vector_width(sizeof(T)));

// W values that are loaded and stored at once. They stay in their storage type until all loads of a batch are under
// way: a conversion would wait for its load.
template <typename T, int W>
struct alignas(W * sizeof(T)) Pack {
  T values[W];
};

// A slot as it was loaded, kept as raw registers: unpacking 16-bit values at the join of two load paths would stall.
template <typename T, int W>
using Bits = std::conditional_t<W == 1, T, std::conditional_t<W * sizeof(T) == kVectorBytes, uint4, uint2>>;

template <typename T, int W>
__device__ __forceinline__ Pack<T, W> pack_of(const Bits<T, W>& bits) {
  Pack<T, W> pack;
  memcpy(&pack, &bits, sizeof(pack));
  return pack;
}

template <typename T, int W>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, W>& pack) {
  if constexpr (W > 1) {
    Bits<T, W> bits;
    memcpy(&bits, &pack, sizeof(bits));
    *reinterpret_cast<Bits<T, W>*>(address) = bits;
  } else {
    *address = pack.values[0];
  }
}

// Planar: the W values at `offset` belong to the row from `first` to before `last`. `last` <= 0: none.
template <int W>
struct Slot {
  int64_t offset;
  int first;
  int last;

  __device__ __forceinline__ bool full() const { return first == 0 && last == W; }
  __device__ __forceinline__ bool holds(int j) const { return first <= j && j < last; }
  // A bit for each value that it holds.
  __device__ __forceinline__ unsigned mask() const { return last > 0 ? (1u << last) - (1u << first) : 0u; }
};

// Interleaved: all values at `offset`; none if it is negative.
struct RowSlot {
  int64_t offset;

  // A bit for the row.
  __device__ __forceinline__ unsigned mask() const { return offset >= 0; }
};

// How a tensor is read: to be read once more by the next pass; or for the last time, so that its lines are the first to
// leave the cache, before those that are yet to be read.
enum class Read { kAgain, kLast };

template <Read kRead, typename V>
__device__ __forceinline__ V load(const V* address) {
  if constexpr (kRead == Read::kLast) {
    return __ldcs(address);
  } else {
    return *address;
  }
}

// The W values at the place of `slot`; those that it does not hold are any. `whole`: whether all of them are in the
// tensor, so that they can be loaded at once.
template <int W, Read kRead, typename T>
__device__ __forceinline__ Bits<T, W> load_slot(const T* x, const Slot<W>& slot, bool whole) {
  if constexpr (W == 1) {
    return slot.holds(0) ? load<kRead>(x + slot.offset) : narrow<T>(0);
  } else {
    Bits<T, W> bits{};
    if (slot.full() || (whole && slot.last > 0)) {
      bits = load<kRead>(reinterpret_cast<const Bits<T, W>*>(x + slot.offset));
    } else if (slot.last > 0) {
      Pack<T, W> pack;
#pragma unroll
      for (int j = 0; j < W; ++j) pack.values[j] = slot.holds(j) ? x[slot.offset + j] : narrow<T>(0);
      memcpy(&bits, &pack, sizeof(bits));
    }
    return bits;
  }
}

template <int W, Read kRead, typename T>
__device__ __forceinline__ Bits<T, W> load_slot(const T* x, const RowSlot& slot, bool) {
  return slot.offset >= 0 ? load<kRead>(reinterpret_cast<const Bits<T, W>*>(x + slot.offset)) : Bits<T, W>{};
}

template <int W, typename T>
__device__ __forceinline__ void store_slot(T* y, const RowSlot& slot, const Pack<T, W>& pack) {
  if (slot.offset >= 0) store_pack(y + slot.offset, pack);
}
template <int W, typename T>
__device__ __forceinline__ void store_slot(T* y, const Slot<W>& slot, const Pack<T, W>& pack) {
  if (W > 1 && slot.full()) {
    store_pack(y + slot.offset, pack);
    return;
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (slot.holds(j)) y[slot.offset + j] = pack.values[j];
  }
}

// The unsigned integer of kBytes bytes.
template <int kBytes>
using Unsigned =
    std::conditional_t<kBytes == 8, uint64_t,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>;

// Calls `body(T())` for the type of `dtype`, on the host or on the device.
#pragma nv_exec_check_disable
template <typename Body>
BAGUA_SYNCBN_HOST_DEVICE auto dispatch(DType dtype, const Body& body) {
  switch (dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, cpu_type, Stored) \
  case DType::k##name:                                        \
    return body(Stored());
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
  __builtin_unreachable();
}

// A value of a per-channel tensor as it was loaded. It is converted later, by as(), so that those of several tensors
// are under way together: a conversion waits for its load, and which one it is has to be found out by a branch.
struct ChannelValue {
  uint64_t bits;
  DType dtype;

  template <typename A>
  __device__ __forceinline__ A as() const {
    return dispatch(dtype, [&](auto value) {
      const auto own = static_cast<Unsigned<sizeof(value)>>(bits);
      memcpy(static_cast<void*>(&value), &own, sizeof(value));
      return static_cast<A>(widen(value));
    });
  }
};

// Loads value c of a per-channel tensor; nothing if there is none.
__device__ __forceinline__ ChannelValue load_channel(const PerChannel& tensor, int64_t c) {
  if (tensor.data == nullptr) return {0, tensor.dtype};
  const auto load_bits = [&](auto value) -> uint64_t {
    return static_cast<const Unsigned<sizeof(value)>*>(tensor.data)[c];
  };
  return {dispatch(tensor.dtype, load_bits), tensor.dtype};
}

template <typename A>
__device__ __forceinline__ void write_channel(const MutablePerChannel& tensor, int64_t c, A value) {
  dispatch(tensor.dtype, [&](auto stored) {
    using T = decltype(stored);
    static_cast<T*>(tensor.data)[c] = narrow<T>(static_cast<Accumulate<T>>(value));
  });
}

}  // namespace bagua_syncbn::cuda
