// The factors of the normalization.
#pragma once

#include <vector>

#include "channels.h"

namespace bagua_syncbn::cpu {

// Factors of (x - mean) * invstd * weight + bias, and the parameter of the activation behind it.
template <typename A>
class Normalization {
 public:
  Normalization(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& mean,
                const Tensor& invstd, int64_t channels, double parameter)
      : invstd(invstd), means_(mean), shifts_(bias, channels, A(0)), scales_(channels), parameter_(parameter) {
    const ChannelArray<A> weights(weight, channels, A(1));
    for (int64_t c = 0; c < channels; ++c) scales_[c] = this->invstd[c] * weights[c];
  }

  NormalizeFactors<A> factors(bool stream) const {
    return {means_.data(), scales_.data(), shifts_.data(), static_cast<A>(parameter_), stream};
  }

  const ChannelArray<A> invstd;

 private:
  const ChannelArray<A> means_, shifts_;
  std::vector<A> scales_;
  const double parameter_;
};

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// Null if there is none.
template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? data_of<T>(*tensor) : nullptr;
}

}  // namespace bagua_syncbn::cpu
