// Per-channel tensors, of any float dtype, as plain arrays of the dtype in which is computed.
#pragma once

#include "../stable_abi.h"
#include "spans.h"

namespace bagua_syncbn::cpu {

// The storage type that the inner loops have for a torch dtype.
template <typename T>
struct BitsOf {
  using type = T;
};
template <>
struct BitsOf<Half> {
  using type = HalfBits;
};
template <>
struct BitsOf<BFloat16> {
  using type = BFloat16Bits;
};

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Returns the values of `tensor`, converted.
template <typename A>
std::vector<A> read_channels(const Tensor& tensor) {
  std::vector<A> values(tensor.numel());
  const Tensor source = dense(tensor);
  dispatch_floating(tensor.scalar_type(), "tensor", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = static_cast<const T*>(source.const_data_ptr());
    for (size_t c = 0; c < values.size(); ++c) values[c] = static_cast<A>(data[c]);
  });
  return values;
}

// Likewise, or `channels` times `otherwise` if there is none.
template <typename A>
std::vector<A> read_channels(const std::optional<Tensor>& tensor, int64_t channels, A otherwise) {
  return tensor ? read_channels<A>(*tensor) : std::vector<A>(channels, otherwise);
}

// Writes `values`, converted, into `tensor`, in place.
template <typename A>
void write_channels(Tensor tensor, const std::vector<A>& values) {
  Tensor target = dense(tensor);
  dispatch_floating(tensor.scalar_type(), "tensor", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = static_cast<T*>(target.mutable_data_ptr());
    for (size_t c = 0; c < values.size(); ++c) data[c] = static_cast<T>(static_cast<Accumulate<T>>(values[c]));
  });
  if (target.get() != tensor.get()) torch::stable::copy_(tensor, target);
}

// Calls `body(TypeTag<storage>(), TypeTag<accumulate>())` for the dtype of the input.
template <typename Body>
void dispatch_input(const Tensor& input, const Body& body) {
  dispatch_floating(input.scalar_type(), "input", [&](auto tag) {
    using T = typename BitsOf<typename decltype(tag)::type>::type;
    body(TypeTag<T>(), TypeTag<Accumulate<T>>());
  });
}

}  // namespace bagua_syncbn::cpu
