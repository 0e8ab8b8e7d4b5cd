// Per-channel tensors of any float dtype as plain arrays of the type that the loops compute in.
#pragma once

#include "../stable_abi.h"
#include "loops.h"

namespace bagua_syncbn::cpu {

// The values of a tensor as an array of type A: its own memory if that is one, else a converted copy. The tensor must
// outlive this.
template <typename A>
class ChannelArray {
 public:
  explicit ChannelArray(const Tensor& tensor) {
    constexpr ScalarType dtype = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
    if (scalar_type(tensor) == dtype && tensor.is_contiguous()) {
      values_ = static_cast<const A*>(tensor.const_data_ptr());
    } else {
      convert(tensor);
    }
  }

  // For a tensor that may be missing: then `channels` times `otherwise`.
  ChannelArray(const std::optional<Tensor>& tensor, int64_t channels, A otherwise)
      : ChannelArray(tensor ? ChannelArray(*tensor) : ChannelArray(channels, otherwise)) {}

  const A* data() const { return values_; }
  A operator[](int64_t channel) const { return values_[channel]; }

 private:
  ChannelArray(int64_t channels, A value) : own_(channels, value), values_(own_.data()) {}
  ChannelArray(ChannelArray&&) = default;  // a vector that is moved keeps its array

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

}  // namespace bagua_syncbn::cpu
