// batch_norm_elemt: act(z) with z = (x - mean) * invstd * weight + bias + residual.

#include "channels.h"
#include "kernels.h"
#include "work.h"

namespace bagua_syncbn::cpu {

void elemt(const void* input, void* output, DType dtype, const Geometry& g, const Factors& tensors,
           const Epilogue& epilogue, Device&) {
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const ChannelFactors<Accumulate<T>> channel(tensors, g.channels, epilogue.parameter);
    const T *x = static_cast<const T*>(input), *residual = static_cast<const T*>(epilogue.residual);
    T* y = static_cast<T*>(output);
    const auto factors = channel.factors(streams(y, g));
    const auto normalize = loops<T>().activated[epilogue.activation].normalize[g.interleaved];
    for_each_stretch(g, nullptr, [&](int64_t o, Rows rows, const uint8_t*) {
      normalize(x + o, residual ? residual + o : nullptr, y + o, rows, factors);
    });
  });
}

}  // namespace bagua_syncbn::cpu
