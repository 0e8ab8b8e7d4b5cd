// Compile-time constants of the kernels that read a whole tensor.
#pragma once

#include "split.h"
#include "values.cuh"

namespace bagua_syncbn::cuda {

enum class Op { kStats, kElemt, kBackwardReduce, kBackwardElemt };

// A kernel of `kOp` for values of type T_, read kWidth_ at a time from a tensor in layout Plan_ (split.h), with a mask
// or with an activation and a residual.
template <Op kOp, typename T_, int kWidth_, typename Plan_, bool kMasked_, bool kActivates_>
struct Traits {
  using T = T_;
  using A = Accumulate<T>;
  using Plan = Plan_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kActivates = kActivates_;
  static constexpr bool kPlanar = std::is_same_v<Plan, Planar>;
  static constexpr bool kReduces = kOp == Op::kStats || kOp == Op::kBackwardReduce;

  // Channels of a thread, and the most channels of a block.
  static constexpr int kLanes = kPlanar ? 1 : kWidth;
  static constexpr int kTile = kPlanar ? 1 : kWidth == 1 ? kWarp : kLineBytes / kVectorBytes * kWidth;

  // Slots of a batch. Scalar slots: twice as many, so that a batch is not too small. Two input tensors: half as many.
  static constexpr bool kOneInput = kOp == Op::kStats || (kOp == Op::kElemt && !kActivates);
  static constexpr int kSlots = (kWidth == 1 ? 2 : 1) * kBatch / (kOneInput ? 1 : 2);
  // The code of all activations is too long to be repeated for each slot.
  static constexpr int kUnroll = kActivates ? 1 : kSlots;
  // A reduction leaves the tensor in the cache for the next pass, an element-wise kernel is the last to read it.
  static constexpr Read kRead = kReduces ? Read::kAgain : Read::kLast;

  // Blocks per multiprocessor to reserve registers for; 0 leaves it to the compiler. With one more block the compiler
  // spills registers, or delays a load, on at least one card.
  static constexpr int resident() {
    constexpr int size = sizeof(T);
    if (kOp == Op::kStats) return kMasked ? 2 : kPlanar || size == 4 ? 4 : size == 8 ? 3 : 2;
    if (kOp == Op::kElemt) return (size == 8 ? 3 : 4) - kActivates;
    if (kActivates) return size == 4 ? 3 : 2;
    if (kOp == Op::kBackwardElemt) return kMasked && kWidth == 8 ? 2 : 3;
    return kPlanar ? (kWidth == 1 ? 4 : 0) : size == 8 ? 2 : 3;
  }
};

}  // namespace bagua_syncbn::cuda
