// Per-channel tensors of any float dtype as arrays of the accumulate type.
#pragma once

#include <vector>

#include "../arguments.h"
#include "../stable_abi.h"
#include "loops.h"

namespace bagua_syncbn::cpu {

// Calls `body` with a value of type `dtype`.
template <typename Body>
void dispatch(DType dtype, const Body& body) {
  switch (dtype) {
#define BAGUA_SYNCBN_CASE(name, type, ...) \
  case DType::k##name:                     \
    return body(type());
    BAGUA_SYNCBN_DTYPES(BAGUA_SYNCBN_CASE)
#undef BAGUA_SYNCBN_CASE
  }
}

// The `count` values of a tensor as type A, converted if necessary. If there is no tensor, all values are `otherwise`.
template <typename A>
class ChannelArray {
 public:
  ChannelArray(const PerChannel& tensor, int64_t count, A otherwise = 0) {
    if (tensor.data != nullptr && tensor.dtype == (std::is_same_v<A, double> ? DType::kDouble : DType::kFloat)) {
      values_ = static_cast<const A*>(tensor.data);
      return;
    }
    own_.assign(count, otherwise);
    values_ = own_.data();
    if (tensor.data == nullptr) return;
    dispatch(tensor.dtype, [&](auto zero) {
      const auto* data = static_cast<const decltype(zero)*>(tensor.data);
      for (int64_t c = 0; c < count; ++c) own_[c] = static_cast<A>(data[c]);
    });
  }
  ChannelArray(const ChannelArray&) = delete;

  const A* data() const { return values_; }
  A operator[](int64_t channel) const { return values_[channel]; }

 private:
  std::vector<A> own_;
  const A* values_;
};

// Sets each value to value(channel, old value).
template <typename Value>
void write_channels(const MutablePerChannel& tensor, int64_t count, const Value& value) {
  dispatch(tensor.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* data = static_cast<T*>(tensor.data);
    for (int64_t c = 0; c < count; ++c) data[c] = static_cast<T>(static_cast<Accumulate<T>>(value(c, data[c])));
  });
}

// Factors of (x - mean) * invstd * weight + bias, and the activation's parameter.
template <typename A>
class ChannelFactors {
 public:
  ChannelFactors(const Factors& factors, int64_t channels, double parameter)
      : invstd(factors.invstd, channels),
        means_(factors.mean, channels),
        shifts_(factors.bias, channels),
        scales_(channels),
        parameter_(static_cast<A>(parameter)) {
    const ChannelArray<A> weights(factors.weight, channels, A(1));
    for (int64_t c = 0; c < channels; ++c) scales_[c] = invstd[c] * weights[c];
  }

  NormalizeFactors<A> factors(bool stream) const {
    return {means_.data(), scales_.data(), shifts_.data(), parameter_, stream};
  }

  const ChannelArray<A> invstd;

 private:
  const ChannelArray<A> means_, shifts_;
  std::vector<A> scales_;
  const A parameter_;
};

}  // namespace bagua_syncbn::cpu
