#include <sys/mman.h>

#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "launch.cuh"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "switch_stack is written for x86-64"
#endif

// Saves the preserved registers on the stack and its address in `*from`. Switches to the stack `to`, which this
// function saved earlier. Like swapcontext, but without its two system calls.
extern "C" void switch_stack(void** from, void* to);
asm(R"(
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {

Place place;
dim3 grid_size, block_size;
extern "C" const int64_t* watched = nullptr;
extern "C" int64_t at_fence[8] = {};

namespace {

constexpr size_t kStack = 64 * 1024;
constexpr size_t kGuard = 4096;
constexpr int kLanes = 32;

enum class State { kReady, kAtBarrier, kInShuffle, kDone };

struct Fiber {
  void* context = nullptr;
  char* stack = nullptr;
  State state = State::kReady;
  uint3 index{};
  unsigned mask = 0;
  uint64_t bits = 0, received = 0;
  int distance = 0;
};

// The running block.
std::vector<Fiber> fibers;
std::vector<std::vector<size_t>> ready;  // threads that can run, by warp
size_t running = 0;
size_t at_barrier = 0, done = 0;
void* scheduler = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;

std::mt19937_64 random_bits;  // reproducible: the seed is fixed
std::string launches;
const std::function<void()>* body = nullptr;
std::string failure;

void fail(const std::string& what) {
  const Fiber& fiber = fibers[running];
  if (failure.empty()) {
    failure = what + ": thread (" + std::to_string(fiber.index.x) + ", " + std::to_string(fiber.index.y) +
              ") of block (" + std::to_string(place.block.x) + ", " + std::to_string(place.block.y) + ")";
  }
}

// Saves this stack in `*from` and switches to `to`, in the memory `stack`. `ends`: whether this stack is never used
// again.
void switch_to(void** from, void* to, [[maybe_unused]] const void* stack, [[maybe_unused]] size_t size,
               [[maybe_unused]] bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, stack, size);
#endif
  switch_stack(from, to);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void switch_to_scheduler() {
  Fiber& fiber = fibers[running];
  switch_to(&fiber.context, scheduler, scheduler_stack, scheduler_stack_size, fiber.state == State::kDone);
}

void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
  (*body)();
  fibers[running].state = State::kDone;
  ++done;
  switch_to_scheduler();
}

void release(size_t thread) {
  fibers[thread].state = State::kReady;
  ready[thread / kLanes].push_back(thread);
}

// Completes a shuffle once all lanes of the mask have reached it.
void try_shuffle() {
  const size_t first = running / kLanes * kLanes;
  const unsigned mask = fibers[running].mask;
  if ((mask >> running % kLanes & 1) == 0) return fail("shuffle: the mask leaves out the lane itself");
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    if (first + lane >= fibers.size()) return fail("shuffle: the mask has a lane outside the block");
    const Fiber& fiber = fibers[first + lane];
    if (fiber.state == State::kDone) return fail("shuffle: the mask has a lane that has ended");
    if (fiber.state != State::kInShuffle) return;
    if (fiber.mask != mask) return fail("shuffle: masks differ");
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    Fiber& fiber = fibers[first + lane];
    const size_t source = lane + fiber.distance < kLanes ? lane + fiber.distance : lane;
    if ((mask >> source & 1) == 0) return fail("shuffle: the source is outside the mask");
    fiber.received = fibers[first + source].bits;
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) != 0) release(first + lane);
  }
}

void run_block(unsigned block, dim3 threads) {
  place.block = {block % grid_size.x, block / grid_size.x, 0};
  ready.assign((fibers.size() + kLanes - 1) / kLanes, {});
  at_barrier = done = 0;
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    const unsigned thread = static_cast<unsigned>(i);
    fiber.index = {thread % threads.x, thread / threads.x, 0};
    // Like a stack saved by switch_stack: six registers and a return address, aligned as in a call.
    void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 2;
    top[0] = reinterpret_cast<void*>(run_fiber);
    fiber.context = top - 6;
    release(i);
  }
  size_t warp = random_bits() % ready.size();
  while (done < fibers.size() && failure.empty()) {
    // A warp runs as far as it can before another one does: without a barrier, it would overtake slower warps.
    for (size_t i = 0; ready[warp].empty(); ++i) {
      if (i == ready.size()) return fail("deadlock: not all threads reach a barrier, or not all lanes a shuffle");
      warp = i == 0 ? random_bits() % ready.size() : (warp + 1) % ready.size();
    }
    std::vector<size_t>& lanes = ready[warp];
    std::swap(lanes[random_bits() % lanes.size()], lanes.back());
    running = lanes.back();
    lanes.pop_back();
    place.thread = fibers[running].index;
    switch_to(&scheduler, fibers[running].context, fibers[running].stack, kStack, false);
    if (at_barrier == fibers.size()) {
      at_barrier = 0;
      for (size_t i = 0; i < fibers.size(); ++i) release(i);
      warp = random_bits() % ready.size();
    }
  }
}

// Gives each fiber a stack. Later launches reuse the stacks.
void make_fibers(size_t count) {
  static std::vector<char*> stacks;
  while (stacks.size() < count) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, kGuard, PROT_NONE) != 0) std::abort();
    stacks.push_back(static_cast<char*>(stack) + kGuard);
  }
  fibers.resize(count);
  for (size_t i = 0; i < count; ++i) fibers[i].stack = stacks[i];
}

}  // namespace

const char* launch(const char* name, dim3 blocks, dim3 threads, const std::function<void()>& kernel) {
  launches += std::string(name) + (blocks.y > 1 ? " in parts\n" : "\n");
  failure.clear();
  grid_size = blocks;
  block_size = threads;
  body = &kernel;
  make_fibers(size_t(threads.x) * threads.y);
  std::vector<unsigned> order(size_t(blocks.x) * blocks.y);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_bits);
  for (size_t i = 0; i < order.size() && failure.empty(); ++i) run_block(order[i], threads);
  return failure.empty() ? nullptr : failure.c_str();
}

void wait_at_barrier() {
  fibers[running].state = State::kAtBarrier;
  ++at_barrier;
  switch_to_scheduler();
}

uint64_t shuffle_down(unsigned mask, uint64_t bits, int distance) {
  const size_t self = running;
  Fiber& fiber = fibers[self];
  fiber.mask = mask;
  fiber.bits = bits;
  fiber.distance = distance;
  fiber.state = State::kInShuffle;
  try_shuffle();
  switch_to_scheduler();
  return fibers[self].received;
}

}  // namespace emulator

extern "C" size_t count_kernels() {
  return bagua_syncbn::cuda::all_kernels().size();
}

extern "C" const char* forget_launches() {
  static std::string forgotten;
  forgotten = std::exchange(emulator::launches, "");
  return forgotten.c_str();
}

// The runtime functions that device.cu calls.
namespace {
cudaError_t load_error = cudaSuccess;
}
extern "C" cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error";
}
extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return load_error;
}

// Loads kernels, which fails with `error`. Returns a Support, or -1 if load_kernels raises.
extern "C" int32_t load_with(int32_t error) {
  load_error = static_cast<cudaError_t>(error);
  try {
    return static_cast<int32_t>(bagua_syncbn::cuda::load_kernels(0));
  } catch (const std::runtime_error&) {
    return -1;
  }
}

namespace {
// Returns the offset of the last slot of each block's last thread. Reads no memory, so the tensor can have any size.
template <typename Walk, typename Plan>
int64_t last_of(const Plan& plan) {
  int64_t last = 0;
  emulator::grid_size = plan.grid();
  emulator::block_size = plan.block();
  emulator::place.thread = {plan.block().x - 1, plan.block().y - 1, 0};
  for (unsigned x = 0; x < plan.grid().x; ++x) {
    for (unsigned y = 0; y < plan.grid().y; ++y) {
      emulator::place.block = {x, y, 0};
      for (Walk walk(plan, false); !walk.done();) last = std::max(last, walk.next().offset);
    }
  }
  return last;
}
}  // namespace

extern "C" int64_t last_offset(bool interleaved, int64_t batch, int64_t channels, int64_t inner, bool reduces) {
  using namespace bagua_syncbn::cuda;
  const bagua_syncbn::Geometry g{interleaved, batch, channels, inner};
  if (interleaved) return last_of<InterleavedWalk<4>>(split_interleaved(g, 4, reduces));
  return last_of<PlanarWalk<4>>(split_planar(g, 4, 0, reduces));
}
