// batch_norm_masked_elemt: as elemt.cu where a position counts, else 0, whatever x is there.

#include "factors.cuh"
#include "mask.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, typename Plan, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, std::is_same_v<Plan, Planar> ? 1 : 3)
    masked_elemt(Plan plan, const T* __restrict__ x, T* __restrict__ y, Mask mask, ElemtArguments arguments) {
  MaskedBatch<Plan, W, kSlots<W>> batch(plan, mask, true);
  Pack<T, W> packs[kSlots<W>];
  batch.load(x, packs);
  NormalizeFactors<A> factors[batch.kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return NormalizeFactors<A>(arguments, c); });
  while (batch.any) {
#pragma unroll
    for (int u = 0; u < kSlots<W>; ++u) {
      if (batch.ends_before(u)) break;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const A value = factors[w % batch.kLanes].normalize(widen(packs[u].values[w]));
        packs[u].values[w] = narrow<T>(batch.counts(u, w) ? value : A(0));
      }
      batch.store(y, u, packs[u]);
    }
    batch.load(x, packs);
  }
}

template <typename T, int W>
struct MaskedElemt {
  static constexpr auto planar = masked_elemt<T, W, Planar>;
  static constexpr auto interleaved = masked_elemt<T, W, Interleaved>;
};

}  // namespace

const char* masked_elemt(const void* x, void* y, DType dtype, const Geometry& g, const Mask& mask,
                         const ElemtArguments& arguments, Stream stream) {
  return launch_elementwise<MaskedElemt>(dtype, g, {x, y}, stream, In{x}, Out{y}, mask, arguments);
}

}  // namespace bagua_syncbn::cuda
