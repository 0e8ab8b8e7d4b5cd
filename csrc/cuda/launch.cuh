// Chooses the kernel of an op, its split and its memory, and launches it. Nothing else launches.
//
// An op has a planar and an interleaved kernel, each for values of type T taken W at a time: as many as a vector holds
// where the addresses of all tensors allow that, else one. They are the members `planar` and `interleaved` of a
// template Kernels<T, W>, and take a plan (split.h), then the arguments of the op.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "split.h"
#include "values.cuh"

namespace bagua_syncbn::cuda {

// All kernels of this library, so that they can be loaded before the first one runs (device.cu).
inline std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

// Adds kernels to all_kernels() when the library is loaded.
struct Known {
  template <typename... Kernels>
  explicit Known(Kernels... kernels) {
    (all_kernels().push_back(reinterpret_cast<const void*>(kernels)), ...);
  }
};

// Launches `kernel`; returns nullptr, or what went wrong. The check catches what the launch itself can report, and does
// not wait for the kernel.
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), const Extent& grid, const Extent& block, Stream stream,
                   std::common_type_t<Parameters>... arguments) {
  if (grid.x > INT32_MAX) return "more channels than a grid has blocks";
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  const dim3 threads(static_cast<unsigned>(block.x), static_cast<unsigned>(block.y));
#if defined(BAGUA_SYNCBN_EMULATOR)
  const auto& known = all_kernels();
  if (std::find(known.begin(), known.end(), reinterpret_cast<const void*>(kernel)) == known.end())
    return "a kernel that is not among all_kernels()";
  return emulator::launch(blocks, threads, [=] { kernel(arguments...); });
#else
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  const cudaError_t error =
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, threads, pointers, 0, stream);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears it, so that torch does not report it again
  return cudaGetErrorString(error);
#endif
}

template <typename Kernels>
inline const Known known_of(Kernels::planar, Kernels::interleaved);

// Calls `start(kernel, plan)` for the layout.
template <typename Kernels, typename T, int W, typename Start>
const char* start_layout(const Geometry& g, const void* tensor, Pass pass, const Start& start) {
  static_cast<void>(&known_of<Kernels>);  // instantiates it
  const char* const too_large = "more than 2^30 values in a row, slots of a channel, or rows in a part of it";
  if (g.interleaved) {
    const Interleaved plan = split_interleaved(g, W, pass);
    return fits(plan) ? start(Kernels::interleaved, plan) : too_large;
  }
  const auto misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(tensor) / sizeof(T) % W);
  const Planar plan = split_planar(g, W, misaligned, pass);
  return fits(plan) ? start(Kernels::planar, plan) : too_large;
}

// Calls `start(kernel, plan)` for the layout and the alignment of `tensors`, all of type T.
template <template <typename, int> class Kernels, typename T, typename Start>
const char* start_variant(const Geometry& g, std::initializer_list<const void*> tensors, Pass pass,
                          const Start& start) {
  constexpr int W = kVector<T>;
  const void* first = *tensors.begin();
  if (!takes_vectors(g, sizeof(T), tensors)) return start_layout<Kernels<T, 1>, T, 1>(g, first, pass, start);
  return start_layout<Kernels<T, W>, T, W>(g, first, pass, start);
}

// Pointers that convert to the type that the kernel takes.
struct In {
  const void* data;
  template <typename T>
  operator const T*() const {
    return static_cast<const T*>(data);
  }
};
struct Out {
  void* data;
  template <typename T>
  operator T*() const {
    return static_cast<T*>(data);
  }
};

// Launches an element-wise op on `tensors` of `dtype`, which are among the arguments.
template <template <typename, int> class Kernels, typename... Arguments>
const char* launch_elementwise(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors,
                               Stream stream, const Arguments&... arguments) {
  // Outside the lambda below, where nvcc 12.4 cannot expand a pack.
  const auto start = [&](auto kernel, const auto& plan) {
    return launch(kernel, plan.grid(), plan.block(), stream, plan, arguments...);
  };
  return dispatch(dtype, [&](auto value) {
    return start_variant<Kernels, decltype(value)>(g, tensors, Pass::kElementwise, start);
  });
}

// Partial results of the parts of each channel, and the counters that tell which part is last. Null for a single part.
struct Scratch {
  double2* partials = nullptr;
  uint32_t* tickets = nullptr;

  Scratch(Workspace& workspace, int64_t parts, int64_t channels) {
    if (parts == 1) return;
    partials = reinterpret_cast<double2*>(workspace.partials(2 * parts * channels));
    tickets = workspace.tickets();
  }
};

// Launches a reduction over `tensors`, which are among the arguments. Its kernels take a Scratch last, which has
// kEntries double2 for each part of a channel.
template <template <typename, int> class Kernels, int kEntries = 1, typename... Arguments>
const char* launch_reduction(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors,
                             Workspace& workspace, Stream stream, const Arguments&... arguments) {
  const auto start = [&](auto kernel, const auto& plan) {
    const Scratch scratch(workspace, plan.parts, kEntries * g.channels);
    return launch(kernel, plan.grid(), plan.block(), stream, plan, arguments..., scratch);
  };
  return dispatch(
      dtype, [&](auto value) { return start_variant<Kernels, decltype(value)>(g, tensors, Pass::kReduction, start); });
}

}  // namespace bagua_syncbn::cuda
