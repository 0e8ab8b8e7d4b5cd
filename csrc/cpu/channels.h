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

// The values of a tensor, which outlives this, as an array of type A: where they are if they are one, else converted.
template <typename A>
class Channels {
 public:
  explicit Channels(const Tensor& tensor) {
    constexpr ScalarType dtype = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
    if (scalar_type(tensor) == dtype && tensor.is_contiguous()) {
      values_ = static_cast<const A*>(tensor.const_data_ptr());
    } else {
      convert(tensor);
    }
  }

  // Likewise, or `channels` times `otherwise` if there is none.
  Channels(const std::optional<Tensor>& tensor, int64_t channels, A otherwise)
      : Channels(tensor ? Channels(*tensor) : Channels(channels, otherwise)) {}

  const A* data() const { return values_; }
  A operator[](int64_t channel) const { return values_[channel]; }

 private:
  Channels(int64_t channels, A value) : own_(channels, value), values_(own_.data()) {}
  Channels(Channels&&) = default;  // a vector that is moved keeps its array

  void convert(const Tensor& tensor) {
    own_.resize(tensor.numel());
    values_ = own_.data();
    const Tensor source = dense(tensor);
    dispatch_floating(scalar_type(tensor), "tensor", [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* data = static_cast<const T*>(source.const_data_ptr());
      for (size_t c = 0; c < own_.size(); ++c) own_[c] = static_cast<A>(data[c]);
    });
  }

  std::vector<A> own_;
  const A* values_;
};

// Sets the values of `dense`, of any float dtype, to what `value` returns for each channel.
template <typename Value>
void write_channels(const Tensor& dense, const Value& value) {
  const int64_t channels = dense.numel();
  dispatch_floating(scalar_type(dense), "tensor", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = static_cast<T*>(dense.mutable_data_ptr());
    for (int64_t c = 0; c < channels; ++c) data[c] = static_cast<T>(static_cast<Accumulate<T>>(value(c)));
  });
}

// Calls `body(TypeTag<storage>(), TypeTag<accumulate>())` for the dtype of the input.
template <typename Body>
void dispatch_input(const Tensor& input, const Body& body) {
  dispatch_floating(scalar_type(input), "input", [&](auto tag) {
    using T = typename BitsOf<typename decltype(tag)::type>::type;
    body(TypeTag<T>(), TypeTag<Accumulate<T>>());
  });
}

}  // namespace bagua_syncbn::cpu
