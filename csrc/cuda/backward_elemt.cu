// batch_norm_backward_elemt: dx = ((g - mean_g) - (x - mean) * projection) * scale, the gradient of the input, where
// g = dy * act'(z) is made once more and not stored: memory is what all of this waits for. Or, where a mask says
// that a position does not count, dy * scale.
//
// Threads are mapped to data as in elemt.cu, with half as many slots of each of the two inputs under way. Factors come
// from the sums and the count of all ranks, which are on the device. Blocks go over the tensors from their end, since
// backward_reduce went from their beginning. In place, a thread loads a slot before it stores there; of a slot that is
// cut short by the end of a row, no thread uses the values that others store.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

template <typename T, int W, bool kMasked, bool kActivates>
struct Traits {
  static constexpr int kUnroll = kActivates ? 1 : kPairs<W>;  // the code of all activations is long
  // Blocks for which a multiprocessor has the registers: with more, the compiler spills on some card.
  static constexpr int resident() {
    if (kActivates) return sizeof(T) == 4 ? 3 : 2;
    return kMasked && W == 8 ? 2 : 3;
  }
};

template <typename T, int W, typename Plan, bool kMasked, bool kActivates, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, Traits<T, W, kMasked, kActivates>::resident())
    backward_elemt(Plan plan, const T* dy, const T* __restrict__ x, T* dx, BackwardElemtArguments arguments, Mask mask,
                   Act<A> act) {
  using Slots = Batch<Plan, W, kPairs<W>, kMasked>;
  using Own = GradientFactors<A>;
  Slots batch(plan, true, mask);
  Loaded<T, W, kPairs<W>, Read::kLast> grads, values;
  const auto load = [&] {
    batch.next();
    grads.load(dy, batch);
    values.load(x, batch);
    if (kMasked) batch.read_mask();
  };
  load();
  const Agreement agreement(arguments, plan.channels);
  Own factors[Slots::kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return Own(arguments, plan.channels, c); });
  if (!agreement.holds()) {  // no gradient survives this
#pragma unroll
    for (Own& each : factors) each.scale = static_cast<A>(NAN);
  }
  while (batch.any) {
#pragma unroll(Traits<T, W, kMasked, kActivates>::kUnroll)
    for (int u = 0; u < kPairs<W>; ++u) {
      const auto slot = batch.pop();
      const Pack<T, W> dy_slot = grads.pop(), x_slot = values.pop();
      A g[W];
      if constexpr (kActivates) {
        normalize(factors, x_slot, g);
        activate<true>(g, act);
      }
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const Own& own = factors[w % Slots::kLanes];
        const A dy_value = widen(dy_slot.values[w]), x_value = widen(x_slot.values[w]);
        g[w] = kActivates ? g[w] * dy_value : dy_value;
        g[w] = kMasked && !slot.counts(w) ? g[w] * own.scale : own.gradient(g[w], x_value);
      }
      store_slot(dx, slot.slot, narrow_all<T>(g));
    }
    if (batch.walk.done()) break;
    load();
  }
}

template <bool kMasked, bool kActivates>
struct BackwardElemt {
  template <typename T, int W, typename Plan>
  static constexpr auto kernel = backward_elemt<T, W, Plan, kMasked, kActivates>;
};

}  // namespace

void backward_elemt(const void* dy, const void* x, void* dx, DType dtype, const Geometry& g,
                    const BackwardElemtArguments& arguments, const Mask* mask, const Epilogue& epilogue,
                    Device& device) {
  const auto start = [&](auto op) {
    launch_elementwise<decltype(op)>(dtype, g, {dy, x, dx}, device, dy, x, dx, arguments,
                                     mask == nullptr ? Mask{} : *mask, epilogue.act);
  };
  if (mask != nullptr) return start(BackwardElemt<true, false>());
  return epilogue.act.code != 0 ? start(BackwardElemt<false, true>()) : start(BackwardElemt<false, false>());
}

}  // namespace bagua_syncbn::cuda
