// Simulates how much of what a reduction has read is still in L2 when the element-wise pass after it asks for it.
//
// Kernels, split and the slots of each thread are those of csrc/cuda: its launches come here, and its walks say what a
// thread loads. For each line "tensors interleaved value_size batch channels inner" of the input (tensors: 1 for
// forward, 2 for backward) a line with two shares of the reads of the second pass, in percent: those that hit, and
// those that would if it read in exactly the opposite order of the first. Blocks go forward at one pace.
#include <algorithm>
#include <deque>
#include <functional>
#include <iostream>
#include <numeric>
#include <vector>

#include "../../tests/ops/emulator/emulator.h"
#include "cuda/batch.cuh"
#include "cuda/reduce.cuh"

using namespace bagua_syncbn;
using namespace bagua_syncbn::cuda;

namespace {

// Of an H100: 50 MB in lines of 128 bytes, 16 ways; blocks that run at a time.
constexpr int64_t kLine = 128, kWays = 16, kSets = (int64_t(50) << 20) / (kLine * kWays);
constexpr int64_t kResident = 4 * 132;

// The line that makes way for another is the one that was read for the last time first, else the one not used for the
// longest time.
class Cache {
 public:
  // Reads or writes a line; whether it was there.
  bool touch(int64_t line, bool read_last = false) {
    Entry* const ways = &entries_[static_cast<uint64_t>(line) * 0x9E3779B97F4A7C15u / 65536 % kSets * kWays];
    Entry* entry = std::find_if(ways, ways + kWays, [&](const Entry& each) { return each.line == line; });
    const bool hit = entry != ways + kWays;
    const auto older = [](const Entry& a, const Entry& b) { return a.used < b.used; };
    if (!hit) entry = std::min_element(ways, ways + kWays, older);
    *entry = {line, ++time_ - (read_last ? INT64_MAX / 2 : 0)};
    return hit;
  }

 private:
  struct Entry {
    int64_t line = -1;
    int64_t used = INT64_MIN;
  };
  std::vector<Entry> entries_ = std::vector<Entry>(kSets * kWays);
  int64_t time_ = 0;
};

using Lines = std::vector<int64_t>;

struct Launch {
  dim3 blocks, threads;
  std::function<void()> kernel;
} launched;
std::vector<Lines> batches;  // of the block whose threads run, of one tensor
int64_t value_size;

template <int K, bool kReversed, int W, typename Plan>
void walk(const Plan& plan) {
  Batch<Plan, W, K, Everywhere> batch(plan, {}, kReversed);
  batch.next();
  for (size_t i = 0; batch.any; ++i) {
    if (batches.size() <= i) batches.emplace_back();
    for (const Slot<W>& slot : batch.slots) {
      if (slot.last > 0) batches[i].push_back((slot.offset + slot.first) * value_size / kLine);
    }
    batch.next();
  }
}

// Kernels that only walk, over so many tensors.
template <int kTensors>
struct Over {
  template <typename T, int W>
  struct Reduction {
    static constexpr int kCount = kTensors == 1 ? kSlots<W> : kPairs<W>;
    static void planar(Planar plan, Scratch) { walk<kCount, false, W>(plan); }
    static void interleaved(Interleaved plan, Scratch) { walk<kCount, false, W>(plan); }
    static constexpr bool groups() { return W > 1; }
    static constexpr auto grouped() {
      return +[](Grouped plan, Scratch) { walk<kCount, false, W>(plan); };
    }
  };
  template <typename T, int W>
  struct Elementwise {
    static constexpr int kCount = kTensors == 1 ? kSlots<W> : kPairs<W>;
    static void planar(Planar plan) { walk<kCount, true, W>(plan); }
    static void interleaved(Interleaved plan) { walk<kCount, true, W>(plan); }
  };
};

// The lines of each batch of a block, without those that the load before has asked for too.
std::deque<Lines> lines_of_block(int64_t index) {
  const dim3 &blocks = launched.blocks, &threads = launched.threads;
  batches.clear();
  emulator::grid_size = blocks;
  emulator::block_size = threads;
  const unsigned block = static_cast<unsigned>(index);
  for (unsigned thread = 0; thread < threads.x * threads.y; ++thread) {
    emulator::place.thread = {thread % threads.x, thread / threads.x, 0};
    emulator::place.block = {block % blocks.x, block / blocks.x % blocks.y, block / blocks.x / blocks.y};
    launched.kernel();
  }
  for (Lines& lines : batches) {
    std::sort(lines.begin(), lines.end());
    lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
  }
  return {batches.begin(), batches.end()};
}

// Calls `visit(line)` in the order in which blocks that run side by side ask for the lines of a tensor.
template <typename Visit>
void run(const Visit& visit) {
  const int64_t blocks = int64_t(launched.blocks.x) * launched.blocks.y * launched.blocks.z;
  std::vector<std::deque<Lines>> running;
  for (int64_t next = 0; next < blocks || !running.empty();) {
    while (static_cast<int64_t>(running.size()) < kResident && next < blocks) running.push_back(lines_of_block(next++));
    for (auto& block : running) {
      if (block.empty()) continue;
      for (const int64_t line : block.front()) visit(line);
      block.pop_front();
    }
    const auto ended = [](const std::deque<Lines>& block) { return block.empty(); };
    running.erase(std::remove_if(running.begin(), running.end(), ended), running.end());
  }
}

class NoWorkspace final : public Workspace {
 public:
  double* partials(int64_t) override { return nullptr; }
  uint32_t* tickets() override { return nullptr; }
};

template <int kTensors>
void simulate(DType dtype, const Geometry& g) {
  const int64_t apart = ceil_div(g.rows() * g.channels * value_size, kLine);  // lines of a tensor
  Cache own, ideal;
  std::vector<int64_t> last_read(apart);
  int64_t time = 0;
  NoWorkspace workspace;
  launch_reduction<Over<kTensors>::template Reduction>(dtype, g, {nullptr}, workspace, nullptr);
  run([&](int64_t line) {
    last_read[line] = ++time;
    for (int t = 0; t < kTensors; ++t) {
      own.touch(line + t * apart);
      ideal.touch(line + t * apart);
    }
  });
  const auto read_and_write = [&](Cache& cache, int64_t line) {
    int64_t hits = 0;
    for (int t = 0; t < kTensors; ++t) hits += cache.touch(line + t * apart, true);
    cache.touch(line + kTensors * apart);
    return hits;
  };
  int64_t hits = 0, reads = 0, best = 0;
  launch_elementwise<Over<kTensors>::template Elementwise>(dtype, g, {nullptr}, nullptr);
  run([&](int64_t line) {
    hits += read_and_write(own, line);
    reads += kTensors;
  });
  Lines order(apart);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return last_read[a] > last_read[b]; });
  for (const int64_t line : order) best += read_and_write(ideal, line);
  std::cout << 100.0 * hits / reads << ' ' << 100.0 * best / (kTensors * apart) << std::endl;
}

}  // namespace

namespace emulator {
thread_local Place place;
dim3 grid_size, block_size;
void let_others_run() {}
void wait_at_barrier() {}
uint64_t shuffle_down(unsigned, uint64_t, int) {
  return 0;
}
const char* launch(dim3 blocks, dim3 threads, const std::function<void()>& kernel) {
  launched = {blocks, threads, kernel};
  return nullptr;
}
}  // namespace emulator

int main() {
  int tensors;
  bool interleaved;
  int64_t batch, channels, inner;
  while (std::cin >> tensors >> interleaved >> value_size >> batch >> channels >> inner) {
    const Geometry g{interleaved, batch, channels, inner};
    const DType dtype = value_size == 2 ? DType::kHalf : value_size == 4 ? DType::kFloat : DType::kDouble;
    tensors == 1 ? simulate<1>(dtype, g) : simulate<2>(dtype, g);
  }
}
