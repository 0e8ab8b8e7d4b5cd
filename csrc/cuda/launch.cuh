// Chooses the kernel of an op, its split and its memory, and launches it. Nothing else launches.
//
// An op is a type with a kernel for each Plan (split.h): `kernel<T, W, Plan>`, for values of type T taken W at a time,
// as many as a vector holds where the addresses of all tensors allow that, else one. It takes the plan, then the
// arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "split.h"
#include "values.cuh"

namespace bagua_syncbn::cuda {

inline void expect(bool success, const char* problem) {
  if (!success) throw std::runtime_error(std::string("CUDA: expected success, got ") + problem);
}

inline void expect_success(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it, so that torch does not report it again
  expect(false, cudaGetErrorString(error));
}

// All kernels that are launched anywhere, so that they can be loaded before the first one runs (device.cu).
inline std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

template <auto kKernel>
struct Kernel;
template <typename... Parameters, void (*kKernel)(Parameters...)>
struct Kernel<kKernel> {
  // Adds the kernel to all_kernels() when the library is loaded.
  static inline const bool known = (all_kernels().push_back(reinterpret_cast<const void*>(kKernel)), true);

  // Launches it with `arguments`, converted to its parameters. The check catches what the launch itself can report, and
  // does not wait for the kernel.
  template <typename... Arguments>
  static void launch(const Extent& grid, const Extent& block, Stream stream, const Arguments&... arguments) {
    static_cast<void>(&known);  // instantiates it
    expect(grid.x <= INT32_MAX, "more channels than a grid has blocks");
    const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
    const dim3 threads(static_cast<unsigned>(block.x), static_cast<unsigned>(block.y));
    run(blocks, threads, stream, static_cast<Parameters>(arguments)...);
  }

 private:
  static void run(dim3 blocks, dim3 threads, Stream stream, Parameters... arguments) {
#if defined(BAGUA_SYNCBN_EMULATOR)
    const char* problem = emulator::launch(__PRETTY_FUNCTION__, blocks, threads, [=] { kKernel(arguments...); });
    expect(problem == nullptr, problem);
#else
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    expect_success(cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), blocks, threads, pointers, 0, stream));
#endif
  }
};

// Partial results of the parts of each channel, and the counters that tell which part is last. Null for a single part.
struct Scratch {
  double2* partials = nullptr;
  uint32_t* tickets = nullptr;

  Scratch(Device& device, int64_t parts, int64_t channels) {
    if (parts == 1) return;
    partials = reinterpret_cast<double2*>(device.partials(2 * parts * channels));
    tickets = device.tickets();
  }
};

// Calls `start(kernel, plan)` with the kernel and the plan for the layout of `tensors`, of type T.
template <typename Op, typename T, int W, typename Start>
void start_layout(const Geometry& g, const void* tensor, Pass pass, const Start& start) {
  const char* const too_large = "more than 2^30 values in a row, slots of a channel, or rows in a part of it";
  if (g.interleaved) {
    const Interleaved plan = split_interleaved(g, W, pass);
    expect(fits(plan), too_large);
    return start(Kernel<Op::template kernel<T, W, Interleaved>>(), plan);
  }
  const auto misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(tensor) / sizeof(T) % W);
  const Planar plan = split_planar(g, W, misaligned, pass);
  expect(fits(plan), too_large);
  start(Kernel<Op::template kernel<T, W, Planar>>(), plan);
}

// Calls `start(kernel, plan)` for the dtype, the layout and the alignment of `tensors`.
template <typename Op, typename Start>
void start_op(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors, Pass pass,
              const Start& start) {
  dispatch(dtype, [&](auto value) {
    using T = decltype(value);
    const void* first = *tensors.begin();
    if (!takes_vectors(g, sizeof(T), tensors)) return start_layout<Op, T, 1>(g, first, pass, start);
    start_layout<Op, T, kVector<T>>(g, first, pass, start);
  });
}

// Launches an element-wise op on `tensors`, which are among the arguments.
template <typename Op, typename... Arguments>
void launch_elementwise(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors,
                        const Device& device, const Arguments&... arguments) {
  start_op<Op>(dtype, g, tensors, Pass::kElementwise, [&](auto kernel, const auto& plan) {
    kernel.launch(plan.grid(), plan.block(), device.stream, plan, arguments...);
  });
}

// Launches a reduction over `tensors`, which are among the arguments. Its kernels take a Scratch last, which has
// Op::kEntries double2 for each part of a channel.
template <typename Op, typename... Arguments>
void launch_reduction(DType dtype, const Geometry& g, std::initializer_list<const void*> tensors, Device& device,
                      const Arguments&... arguments) {
  start_op<Op>(dtype, g, tensors, Pass::kReduction, [&](auto kernel, const auto& plan) {
    const Scratch scratch(device, plan.parts, Op::kEntries * g.channels);
    kernel.launch(plan.grid(), plan.block(), device.stream, plan, arguments..., scratch);
  });
}

}  // namespace bagua_syncbn::cuda
