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

template <typename T, int W, typename Epilogue>
struct Traits {
  static constexpr bool kActivates = Epilogue::kActivates;
  // Slots that a thread loads at once: half as many if there may be a residual too.
  static constexpr int kCount = kActivates ? kPairs<W> : kSlots<W>;
  static constexpr int kUnroll = kActivates ? 1 : kCount;  // the code of all activations is long
  // Blocks for which a multiprocessor has the registers: with more, the compiler spills on some card.
  static constexpr int kResident = (sizeof(T) == 8 ? 3 : 4) - kActivates;
};

template <typename T, int W, typename Plan, typename Epilogue, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, Traits<T, W, Epilogue>::kResident)
    elemt(Plan plan, const T* __restrict__ x, T* __restrict__ y, ElemtArguments arguments, Epilogue epilogue) {
  constexpr int kCount = Traits<T, W, Epilogue>::kCount;
  using Slots = Batch<Plan, W, kCount, Everywhere>;
  constexpr Everywhere everywhere;
  Slots batch(plan, everywhere, true);
  Loaded<T, W, kCount, Read::kLast> values, residuals;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    if (epilogue.residual != nullptr) residuals.load(epilogue.residual, batch);
  };
  load();
  NormalizeFactors<A> factors[Slots::kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return NormalizeFactors<A>(arguments, c); });
  while (batch.any) {
#pragma unroll(Traits<T, W, Epilogue>::kUnroll)
    for (int u = 0; u < kCount; ++u) {
      const auto slot = batch.pop();
      A z[W];
      normalize(factors, values.pop(), z);
      if (epilogue.residual != nullptr) add(residuals.pop(), z);
      epilogue.template apply<false>(z);
      slot.store(y, narrow_all<T>(z));
    }
    if (batch.walk.done()) break;
    load();
  }
}

template <template <typename> class Epilogue>
struct Elemt {
  template <typename T, int W>
  struct Kernels {
    static constexpr auto planar = elemt<T, W, Planar, Epilogue<T>>;
    static constexpr auto interleaved = elemt<T, W, Interleaved, Epilogue<T>>;
  };
};

}  // namespace

const char* elemt(const void* x, void* y, DType dtype, const Geometry& g, const ElemtArguments& arguments,
                  const Options& options, Stream stream) {
  const auto tensors = {x, static_cast<const void*>(y), options.residual == nullptr ? x : options.residual};
  const auto start = [&](auto op) {
    return launch_elementwise<decltype(op)::template Kernels>(dtype, g, tensors, stream, In{x}, Out{y}, arguments,
                                                              EpilogueOf{options});
  };
  return options.act.code != 0 || options.residual != nullptr ? start(Elemt<Activated>()) : start(Elemt<Plain>());
}

}  // namespace bagua_syncbn::cuda
