// batch_norm_elemt: y = act((x - mean) * invstd * weight + bias + residual); where a mask says that a position does not
// count, 0, whatever x is there.
//
// Planar: a block takes a part of a channel, so that the factors are read once by each block. Interleaved: a block
// takes a range of rows of a tile of channels, a thread the factors of its W channels, by way of shared memory. See
// walk.cuh for both. Blocks go over the tensor from its end: the statistics went over it from its beginning, and what
// they read last is still cached. The mean is subtracted first: folded into the bias it would cancel where it is large
// beside the deviation.

#include "act.cuh"

namespace bagua_syncbn::cuda {
namespace {

// Blocks for which a multiprocessor has the registers: with more, the compiler spills on some card.
template <typename T, int W, typename Plan, typename Where, typename Epilogue>
constexpr int kResident = Epilogue::kActivates                ? (sizeof(T) == 8 ? 2 : 3)
                          : std::is_same_v<Where, Everywhere> ? (sizeof(T) == 8 ? 3 : 4)
                          : std::is_same_v<Plan, Planar>      ? 1
                          : W == 8 || sizeof(T) == 8          ? 2
                                                              : 3;

template <typename T, int W, typename Plan, typename Where, typename Epilogue, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kThreads, kResident<T, W, Plan, Where, Epilogue>)
    elemt(Plan plan, const T* __restrict__ x, T* __restrict__ y, ElemtArguments arguments, Where where,
          Epilogue epilogue) {
  constexpr int kCount = Epilogue::kActivates ? kPairs<W> : kSlots<W>;  // half as many where there may be two tensors
  using Slots = Batch<Plan, W, kCount, Where>;
  Slots batch(plan, where, true);
  Loaded<T, W, kCount, Read::kLast> values, residuals;
  const auto load = [&] {
    batch.next();
    values.load(x, batch);
    if (epilogue.residual != nullptr) residuals.load(epilogue.residual, batch);
    if (Slots::kMasked) batch.read_mask();
  };
  load();
  NormalizeFactors<A> factors[Slots::kLanes];  // waited for together with the first batch
  share_factors(factors, batch.walk, [&](int64_t c) { return NormalizeFactors<A>(arguments, c); });
  while (batch.any) {
#pragma unroll(Epilogue::kActivates ? 1 : kCount)  // the code of all activations is long
    for (int u = 0; u < kCount; ++u) {
      const auto slot = batch.pop();
      A z[W];
      normalize(factors, values.pop(), z);
      if (epilogue.residual != nullptr) add(residuals.pop(), z);
      epilogue.template apply<false>(z);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (Slots::kMasked && !slot.counts(w)) z[w] = 0;
      }
      slot.store(y, narrow_all<T>(z));
    }
    load();
  }
}

template <typename Where, template <typename> class Epilogue>
struct Elemt {
  template <typename T, int W>
  struct Kernels {
    static constexpr auto planar = elemt<T, W, Planar, Where, Epilogue<T>>;
    static constexpr auto interleaved = elemt<T, W, Interleaved, Where, Epilogue<T>>;
  };
};

}  // namespace

const char* elemt(const void* x, void* y, DType dtype, const Geometry& g, const ElemtArguments& arguments,
                  const Options& options, Stream stream) {
  const auto tensors = {x, static_cast<const void*>(y), options.residual == nullptr ? x : options.residual};
  const bool activates = options.act.code != 0 || options.residual != nullptr;
  return start_policies<Elemt>(options, activates, [&](auto op) {
    return launch_elementwise<decltype(op)::template Kernels>(dtype, g, tensors, stream, In{x}, Out{y}, arguments,
                                                              WhereOf{options.mask}, EpilogueOf{options});
  });
}

}  // namespace bagua_syncbn::cuda
