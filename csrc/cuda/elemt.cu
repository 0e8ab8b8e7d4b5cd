// batch_norm_elemt: y = act((x - mean) * invstd * weight + bias + residual).
//
// Planar: a block takes a part of a channel, so that the factors are read once by each block. Interleaved: a block
// takes a range of rows of a tile of channels, a thread the factors of its W channels, by way of shared memory. See
// walk.cuh for both. Blocks go over the tensor from its end: the statistics went over it from its beginning, and what
// they read last is still cached. The mean is subtracted first: folded into the bias it would cancel where it is large
// beside the deviation.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, bool kActivates>
struct Traits {
  // Slots that a thread loads at once: half as many if there may be a residual too.
  static constexpr int kCount = kActivates ? kPairs<W> : kSlots<W>;
  static constexpr int kUnroll = kActivates ? 1 : kCount;  // the code of all activations is long
  // Blocks for which a multiprocessor has the registers: with more, the compiler spills on some card.
  static constexpr int kResident = (sizeof(T) == 8 ? 3 : 4) - kActivates;
};

// Without an activation, `residual` and `act` are not used.
template <typename T, int W, typename Plan, bool kActivates, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, Traits<T, W, kActivates>::kResident)
    elemt(Plan plan, const T* __restrict__ x, T* __restrict__ y, Factors tensors, const T* residual, Act<A> act) {
  constexpr int kCount = Traits<T, W, kActivates>::kCount;
  using Slots = Batch<Plan, W, kCount>;
  Slots batch(plan, true);
  Loaded<T, W, kCount, Read::kLast> values, residuals;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    if (kActivates && residual != nullptr) residuals.load(residual, batch);
  };
  load();
  NormalizeFactors<A> factors[Slots::kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return NormalizeFactors<A>(tensors, c); });
  while (batch.any) {
#pragma unroll(Traits<T, W, kActivates>::kUnroll)
    for (int u = 0; u < kCount; ++u) {
      const auto slot = batch.pop();
      A z[W];
      normalize(factors, values.pop(), z);
      if (kActivates && residual != nullptr) add(residuals.pop(), z);
      if (kActivates) activate<false>(z, act);
      store_slot(y, slot.slot, narrow_all<T>(z));
    }
    if (batch.walk.done()) break;
    load();
  }
}

template <bool kActivates>
struct Elemt {
  template <typename T, int W, typename Plan>
  static constexpr auto kernel = elemt<T, W, Plan, kActivates>;
};

}  // namespace

void elemt(const void* x, void* y, DType dtype, const Geometry& g, const Factors& factors, const Epilogue& epilogue,
           Device& device) {
  const auto tensors = {x, static_cast<const void*>(y), epilogue.residual == nullptr ? x : epilogue.residual};
  const auto start = [&](auto op) {
    launch_elementwise<decltype(op)>(dtype, g, tensors, device, x, y, factors, epilogue.residual, epilogue.act);
  };
  return epilogue.act.code != 0 || epilogue.residual != nullptr ? start(Elemt<true>()) : start(Elemt<false>());
}

}  // namespace bagua_syncbn::cuda
