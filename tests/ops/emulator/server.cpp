// Serves calls of the ops over a pipe: reads one from stdin, runs it, answers on stdout, until stdin ends.
//
// A program of its own, so that it can run under AddressSanitizer whatever program has started it. Each buffer is an
// allocation of exactly its size, so that one value too far is seen.
//
//   call:   int64 counts of integers, doubles and buffers; the integers: op, dtype, interleaved, batch, channels,
//   inner,
//           seed, then those of the op; the doubles; the buffers, each with its size in bytes (-1 for null), by how
//           many bytes it begins after a multiple of 256, its dtype, and its bytes
//   answer: int64 length of the error, 0 for none, and the error; int64 launches; the bytes of all buffers

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "emulator.h"
#include "kernels.h"

namespace {

using namespace bagua_syncbn;
using namespace bagua_syncbn::cuda;

struct Buffer {
  int64_t size = -1;
  DType dtype{};
  void* base = nullptr;
  void* data = nullptr;

  PerChannel channels() const { return {data, dtype}; }
  int64_t* integers() const { return static_cast<int64_t*>(data); }
};

class TestWorkspace final : public Workspace {
 public:
  double* partials(int64_t count) override {
    partials_ = static_cast<double*>(std::malloc(count * sizeof(double)));
    std::fill_n(partials_, count, NAN);
    return partials_;
  }
  uint32_t* tickets() override { return tickets_.data(); }

  bool left_zero() const {
    return std::all_of(tickets_.begin(), tickets_.end(), [](uint32_t ticket) { return ticket == 0; });
  }

  ~TestWorkspace() { std::free(partials_); }

 private:
  double* partials_ = nullptr;
  std::vector<uint32_t> tickets_ = std::vector<uint32_t>(kTickets);
};

void read_bytes(void* target, size_t size) {
  if (std::fread(target, 1, size, stdin) != size) std::exit(0);
}

template <typename T>
std::vector<T> read_values(size_t count) {
  std::vector<T> values(count);
  read_bytes(values.data(), count * sizeof(T));
  return values;
}

Buffer read_buffer() {
  const auto header = read_values<int64_t>(3);
  Buffer buffer;
  buffer.size = header[0];
  buffer.dtype = static_cast<DType>(header[2]);
  if (buffer.size < 0) return buffer;
  if (posix_memalign(&buffer.base, 256, header[1] + buffer.size + (header[1] + buffer.size == 0)) != 0) std::abort();
  buffer.data = static_cast<char*>(buffer.base) + header[1];
  read_bytes(buffer.data, buffer.size);
  return buffer;
}

Words words_of(const std::vector<int64_t>& integers, size_t begin) {
  Words words;
  for (size_t i = begin; i < integers.size(); ++i) words.values[words.count++] = static_cast<int32_t>(integers[i]);
  return words;
}

// Integers 7 to 9 and a double: whether the mask has lengths, the length of a line, the activation.
class GivenOptions {
 public:
  GivenOptions(const std::vector<int64_t>& integers, const std::vector<double>& doubles, const Buffer& mask,
               const Buffer& residual, const Geometry& g)
      : mask_{integers[7] == 0 ? static_cast<const uint8_t*>(mask.data) : nullptr,
              integers[7] == 0 ? nullptr : mask.integers(), g.inner, integers[8]},
        options_{mask.data == nullptr ? nullptr : &mask_, residual.data, {integers[9], doubles[0]}} {}
  operator const Options&() const { return options_; }
  const Mask& mask() const { return mask_; }

 private:
  const Mask mask_;
  const Options options_;
};

const char* run(const std::vector<int64_t>& integers, const std::vector<double>& doubles, const std::vector<Buffer>& b,
                Workspace& workspace) {
  const auto dtype = static_cast<DType>(integers[1]);
  const Geometry g{integers[2] != 0, integers[3], integers[4], integers[5]};
  switch (integers[0]) {
    case 0: {
      const GivenOptions options(integers, doubles, b[1], {}, g);
      const Words words = words_of(integers, 10);
      return b[1].data == nullptr
                 ? stats(b[0].data, dtype, g, b[2].data, words, workspace, nullptr)
                 : masked_stats(b[0].data, dtype, g, options.mask(), b[2].data, words, workspace, nullptr);
    }
    case 1:
      return gather_stats({b[0].data, integers[7], g.channels, dtype, b[1].data, b[2].data, b[3].integers(),
                           b[4].channels(), b[5].channels(), b[6].integers(), integers[8] != 0, doubles[0], doubles[1],
                           integers[9], integers[10] != 0, b[7].integers()},
                          nullptr);
    case 2:
      return elemt(b[0].data, b[1].data, dtype, g, {b[2].channels(), b[3].channels(), b[4].channels(), b[5].channels()},
                   GivenOptions(integers, doubles, b[6], b[7], g), nullptr);
    case 3:
      return backward_reduce(b[0].data, b[1].data, b[2].data, dtype, g,
                             {b[3].channels(), b[4].channels(), b[5].data, b[6].channels(), b[7].channels(),
                              words_of(integers, 10), b[8].channels(), b[9].channels()},
                             GivenOptions(integers, doubles, b[10], b[11], g), workspace, nullptr);
    case 4:
    case 5:  // in place
      return backward_elemt(
          b[0].data, b[1].data, b[integers[0] == 4 ? 2 : 0].data, dtype, g,
          {b[3].channels(), b[4].channels(), b[5].channels(), b[6].channels(), b[7].integers(), integers[10],
           integers[11], integers[12], b[8].integers(), b[9].channels(), integers[13] != 0},
          GivenOptions(integers, doubles, b[10], {}, g), nullptr);
    default:
      return "no such op";
  }
}

}  // namespace

int main() {
  for (;;) {
    const auto counts = read_values<int64_t>(3);
    const auto integers = read_values<int64_t>(counts[0]);
    const auto doubles = read_values<double>(counts[1]);
    std::vector<Buffer> buffers(counts[2]);
    for (Buffer& buffer : buffers) buffer = read_buffer();
    emulator::set_seed(integers[6]);
    emulator::launches = 0;
    TestWorkspace workspace;
    const char* error = run(integers, doubles, buffers, workspace);
    std::string answer = error == nullptr ? "" : error;
    if (error == nullptr && !workspace.left_zero()) answer = "a ticket counter is not zero at the end";
    const int64_t length = static_cast<int64_t>(answer.size()), launches = emulator::launches;
    std::fwrite(&length, sizeof(length), 1, stdout);
    std::fwrite(answer.data(), 1, answer.size(), stdout);
    std::fwrite(&launches, sizeof(launches), 1, stdout);
    for (const Buffer& buffer : buffers) {
      if (buffer.size >= 0) std::fwrite(buffer.data, 1, buffer.size, stdout);
      std::free(buffer.base);
    }
    std::fflush(stdout);
  }
}
