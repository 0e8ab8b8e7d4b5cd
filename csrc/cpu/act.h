// An activation, and the factors of the normalization before it.
#pragma once

#include <vector>

#include "../geometry.h"
#include "channels.h"
#include "work.h"

namespace bagua_syncbn::cpu {

// An activation, and what is added before it: the bias, and a residual in the layout of the input.
struct Activation {
  std::optional<Tensor> bias, residual;
  int64_t code;
  double parameter;

  template <typename T>
  Epilogue<T> epilogue() const {
    using A = Accumulate<T>;
    return {residual ? static_cast<const T*>(residual->const_data_ptr()) : nullptr, {code, static_cast<A>(parameter)}};
  }
};

// The factors of (x - mean) * invstd * weight + bias.
template <typename A>
class Normalization {
 public:
  Normalization(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& mean,
                const Tensor& invstd, int64_t channels)
      : means_(mean), shifts_(bias, channels, A(0)), scales_(channels) {
    const ChannelArray<A> invstds(invstd), weights(weight, channels, A(1));
    for (int64_t c = 0; c < channels; ++c) scales_[c] = invstds[c] * weights[c];
  }

  NormalizeFactors<A> factors(bool stream) const { return {means_.data(), scales_.data(), shifts_.data(), stream}; }

 private:
  const ChannelArray<A> means_, shifts_;
  std::vector<A> scales_;
};

// Returns dy * act'(z). See backward_reduce.cpp.
Tensor gradient_through(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& weight,
                        const Tensor& mean, const Tensor& invstd, const Activation& activation);

}  // namespace bagua_syncbn::cpu
