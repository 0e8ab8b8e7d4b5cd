// Conversions, loads and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels.h"
#include "split.h"

namespace bagua_syncbn::cuda {

// Converts a stored value to the accumulate type. A cast converts it back, rounded to nearest.
template <typename T>
BAGUA_SYNCBN_HOST_DEVICE __forceinline__ Accumulate<T> widen(T value) {
  return static_cast<Accumulate<T>>(value);
}

// W values that are loaded and stored together. They keep their storage type until all loads of a batch are issued,
// because a conversion waits for its load.
template <typename T, int W>
struct alignas(W * sizeof(T)) Pack {
  T values[W];
};

// A loaded slot, kept as raw registers: unpacking 16-bit values where two load paths join would stall.
template <typename T, int W>
using Bits = std::conditional_t<W == 1, T, std::conditional_t<W * sizeof(T) == kVectorBytes, uint4, uint2>>;

template <typename T, int W>
__device__ __forceinline__ Pack<T, W> pack_of(const Bits<T, W>& bits) {
  Pack<T, W> pack;
  memcpy(&pack, &bits, sizeof(pack));
  return pack;
}

// Planar: of the W values at `offset`, `first` to `last` - 1 belong to the row; none if `last` <= 0. Interleaved: all
// W, or none if `offset` is negative, which needs fewer registers.
template <int W, bool kPlanar>
struct Slot {
  int64_t offset;
  int first;
  int last;

  __device__ __forceinline__ bool empty() const { return kPlanar ? last <= 0 : offset < 0; }
  __device__ __forceinline__ bool full() const { return kPlanar ? first == 0 && last >= W : !empty(); }
  __device__ __forceinline__ bool holds(int j) const { return kPlanar ? first <= j && j < last : !empty(); }
  // A bit for each value of the row.
  __device__ __forceinline__ unsigned mask() const { return empty() ? 0u : (1u << last) - (1u << first); }
};

// `kLast`: no later pass reads the tensor, so its cache lines are evicted first.
template <bool kLast, typename V>
__device__ __forceinline__ V load(const V* address) {
  return kLast ? __ldcs(address) : *address;
}

// Loads the W values of `slot`. Values outside its row are arbitrary. `whole`: all W values are inside the tensor, so
// one load is safe.
template <bool kLast, typename T, int W, bool kPlanar>
__device__ __forceinline__ Bits<T, W> load_slot(const T* x, const Slot<W, kPlanar>& slot, bool whole) {
  Bits<T, W> bits{};
  if (slot.full() || (whole && !slot.empty())) {
    bits = load<kLast>(reinterpret_cast<const Bits<T, W>*>(x + slot.offset));
  } else if (!slot.empty()) {
    Pack<T, W> pack;
#pragma unroll
    for (int j = 0; j < W; ++j) pack.values[j] = slot.holds(j) ? x[slot.offset + j] : static_cast<T>(0.0f);
    memcpy(static_cast<void*>(&bits), &pack, sizeof(bits));
  }
  return bits;
}

// Rounds the values of `slot` and stores them.
template <typename T, int W, bool kPlanar>
__device__ __forceinline__ void store_slot(T* y, const Slot<W, kPlanar>& slot, const Accumulate<T> (&values)[W]) {
  Pack<T, W> pack;
#pragma unroll
  for (int j = 0; j < W; ++j) pack.values[j] = static_cast<T>(values[j]);
  if (W > 1 && slot.full()) {
    *reinterpret_cast<Pack<T, W>*>(y + slot.offset) = pack;
    return;
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (slot.holds(j)) y[slot.offset + j] = pack.values[j];
  }
}

// Calls `body(T())` with the storage type T of `dtype`, on host or device.
#pragma nv_exec_check_disable
template <typename Body>
BAGUA_SYNCBN_HOST_DEVICE auto dispatch(DType dtype, const Body& body) {
  switch (dtype) {
#define BAGUA_SYNCBN_CASE(name, torch_type, Stored) \
  case DType::k##name:                              \
    return body(Stored());
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
  __builtin_unreachable();
}

// A loaded value of a per-channel tensor of any dtype. as() converts it, which branches on the dtype and waits for the
// load: a thread loads from several tensors before it converts the first value.
struct ChannelValue {
  DType dtype = DType::kFloat;
  uint64_t bits = 0;

  ChannelValue() = default;
  // Loads value c of `tensor`; `otherwise` if the tensor is null.
  __device__ __forceinline__ ChannelValue(const PerChannel& tensor, int64_t c, float otherwise = 0)
      : dtype(tensor.data == nullptr ? DType::kFloat : tensor.dtype) {
    if (tensor.data == nullptr) {
      memcpy(&bits, &otherwise, sizeof(otherwise));
    } else {
      dispatch(dtype, [&](auto value) {
        value = static_cast<const decltype(value)*>(tensor.data)[c];
        memcpy(&bits, &value, sizeof(value));
      });
    }
  }

  template <typename A>
  __device__ __forceinline__ A as() const {
    return dispatch(dtype, [&](auto value) {
      memcpy(static_cast<void*>(&value), &bits, sizeof(value));
      return static_cast<A>(widen(value));
    });
  }
};

template <typename A>
__device__ __forceinline__ void write_channel(const MutablePerChannel& tensor, int64_t c, A value) {
  dispatch(tensor.dtype, [&](auto stored) {
    using T = decltype(stored);
    static_cast<T*>(tensor.data)[c] = static_cast<T>(static_cast<Accumulate<T>>(value));
  });
}

}  // namespace bagua_syncbn::cuda
