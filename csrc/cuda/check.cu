// Compares each op in each dtype with plain loops, without torch: nvcc csrc/cuda/check.cu -o check && ./check
// Prints the largest errors as shares of the allowed error. The exit status is 0 if every op is right.
#include <cmath>
#include <cstdio>
#include <map>

#include "backward_elemt.cu"
#include "backward_reduce.cu"
#include "elemt.cu"
#include "gather_stats.cu"
#include "stats.cu"

using namespace bagua_syncbn;
using namespace bagua_syncbn::cuda;
std::map<std::string, double[4]> largest;  // errors, by op and dtype

// Returns pseudo-random numbers between `low` and `high`, in pinned memory.
template <typename T>
T* numbers(int64_t count, double low = 0, double high = 1) {
  static uint32_t state = 1;
  void* memory = nullptr;
  expect_success(cudaMallocHost(&memory, count * sizeof(T)));
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    static_cast<T*>(memory)[i] = narrow<T>(static_cast<Accumulate<T>>(low + (high - low) * (state / 4294967296.0)));
  }
  return static_cast<T*>(memory);
}

struct DefaultStream final : Device {
  double* allocate(int64_t doubles) override { return numbers<double>(doubles); }
};

template <typename T>
struct Check {
  using A = Accumulate<T>;
  const DType dtype;
  const Geometry g;
  const DType accumulate = sizeof(A) == 8 ? DType::kDouble : DType::kFloat;
  const int64_t rows = g.rows(), channels = g.channels, size = rows * channels, row_size = row_size_of(channels, 0);
  T *x = numbers<T>(size, 0, 4), *dy = numbers<T>(size, 0, 2), *residual = numbers<T>(size), *out = numbers<T>(size);
  A *mean = numbers<A>(channels, 1, 2), *invstd = numbers<A>(channels, 0.5, 1), *weight = numbers<A>(channels, 1, 2);
  A *bias = numbers<A>(channels), *sums = numbers<A>(2 * channels), *packed = numbers<A>(2 * row_size);
  int64_t* count = reinterpret_cast<int64_t*>(numbers<double>(1));
  uint8_t* valid = reinterpret_cast<uint8_t*>(numbers<T>(rows));
  const Factors factors{{mean, accumulate}, {invstd, accumulate}, {weight, accumulate}, {bias, accumulate}};
  DefaultStream device;
  int64_t at(int64_t r, int64_t c) const {
    return g.interleaved ? r * channels + c : (r / g.inner * channels + c) * g.inner + r % g.inner;
  }
  double value(const T* tensor, int64_t row, int64_t c) const { return widen(tensor[at(row, c)]); }

  // Records the error of `got`, which was computed from terms of size `scale`, as a share of the allowed error.
  template <typename V>
  void compare(const char* op, V got, double expected, double scale = 0) const {
    const double rounding = sizeof(V) == 8 ? 1e-13 : sizeof(V) == 4 ? 1e-6 : std::is_same_v<V, __half> ? 1e-3 : 8e-3;
    const double error = std::abs(widen(got) - expected) / (rounding * std::max(std::abs(expected), scale) + 1e-300);
    double& noted = largest[op][static_cast<int>(dtype)];
    noted = std::max(noted, std::isnan(error) ? HUGE_VAL : error);
  }

  // Two ranks (the second has a mask) and their merge.
  void check_statistics() {
    const auto counts = [&](int rank, int64_t r) { return rank == 0 || valid[r] ? 1 : 0; };
    for (int64_t r = 0; r < rows; ++r) valid[r] = r % 3 != 1;
    A *merged = numbers<A>(2 * channels), *running = numbers<A>(2 * channels, 0.5, 0.5);
    const MutablePerChannel running_mean{running, accumulate}, running_var{running + channels, accumulate};
    stats(x, dtype, g, nullptr, packed, {}, device);
    stats(x, dtype, g, valid, packed + row_size, {}, device);
    gather_stats({packed, 2, channels, accumulate, merged, merged + channels, count, running_mean, running_var, nullptr,
                  false, 0.1, 1e-5, 0, true, nullptr, false, 0},
                 device);
    expect_success(cudaDeviceSynchronize());
    for (int64_t c = 0; c < channels; ++c) {
      double total = 0, sum = 0, squares = 0;
      for (int rank = 0; rank < 2; ++rank) {
        const A* const row = packed + rank * row_size;
        double n = 0, own = 0, m2 = 0;
        for (int64_t r = 0; r < rows; ++r) n += counts(rank, r);
        for (int64_t r = 0; r < rows; ++r) own += counts(rank, r) * value(x, r, c) / n;
        for (int64_t r = 0; r < rows; ++r) m2 += counts(rank, r) * pow(value(x, r, c) - own, 2);
        compare("stats", row[c], own);
        compare("stats", row[channels + c], m2 / n);
        compare("stats", double(unpack_count(row, channels)), n);
        total += n, sum += n * row[c], squares += n * (row[channels + c] + pow(row[c], 2));
      }
      const double average = sum / total, var = squares / total - average * average;
      compare("gather_stats", merged[c], average);
      compare("gather_stats", merged[channels + c], 1 / sqrt(var + 1e-5), 1);
      compare("gather_stats", running[c] + running[channels + c], 0.9 + 0.1 * (average + var * total / (total - 1)));
      compare("gather_stats", double(*count), total);
    }
  }

  // The other ops: plain, with a mask, or with a sigmoid and (except in backward_elemt) a residual.
  void check_passes(bool masked, bool activates) {
    const Act<double> act{activates ? static_cast<int64_t>(Code::kSigmoid) : 0, 0};
    const Epilogue epilogue{activates ? residual : nullptr, act};
    T *const dx = numbers<T>(size), *const grad_buffer = activates ? numbers<T>(size) : nullptr;
    A* const grads = numbers<A>(2 * channels);
    const MutablePerChannel grad_weight{grads, accumulate}, grad_bias{grads + channels, accumulate};
    elemt(x, out, dtype, g, factors, epilogue, device);
    backward_reduce(dy, x, grad_buffer, dtype, g, {factors, sums, grad_weight, grad_bias, {}}, epilogue, device);
    backward_elemt(dy, x, dx, dtype, g, {factors, sums, count, 0, 1, 0, nullptr}, masked ? valid : nullptr,
                   {nullptr, act}, device);
    expect_success(cudaDeviceSynchronize());
    for (int64_t c = 0; c < channels; ++c) {
      const double average = sums[c] / double(*count), slope = sums[channels + c] * pow(invstd[c], 2) / double(*count);
      double sum_dy = 0, sum_dy_xmu = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const double xmu = value(x, r, c) - mean[c], z = xmu * invstd[c] * weight[c] + bias[c];
        const double s = 1 / (1 + exp(-z)), added = 1 / (1 + exp(-z - value(residual, r, c)));
        const double gradient = value(dy, r, c) * (activates ? added * (1 - added) : 1);
        const double from_output = value(dy, r, c) * (activates ? s * (1 - s) : 1);
        const double from_statistics = masked && !valid[r] ? 0 : average + xmu * slope;
        compare("elemt", out[at(r, c)], activates ? added : z, 4);
        compare("backward_elemt", dx[at(r, c)], (from_output - from_statistics) * invstd[c] * weight[c], 8);
        if (activates) compare("backward_reduce", grad_buffer[at(r, c)], gradient, 1);
        sum_dy += gradient, sum_dy_xmu += gradient * xmu;
      }
      compare("backward_reduce", sums[c], sum_dy);
      compare("backward_reduce", sums[channels + c], sum_dy_xmu, 2 * sum_dy);
      compare("backward_reduce", grads[c], sum_dy_xmu * invstd[c], 2 * sum_dy);
      compare("backward_reduce", grads[channels + c], sum_dy);
    }
  }
};

int main() {
  // Both layouts; vectors and scalars; one and several blocks per channel.
  const Geometry shapes[] = {{false, 2, 3, 20001}, {false, 3, 40, 9}, {true, 1, 24, 5000}, {true, 30, 300, 2}};
  for (const Geometry& g : shapes) {
    for (const DType dtype : {DType::kHalf, DType::kBFloat16, DType::kFloat, DType::kDouble}) {
      dispatch(dtype, [&](auto value) {
        Check<decltype(value)> ops{dtype, g};
        ops.check_statistics();
        for (int options = 0; options < 3; ++options) ops.check_passes(options == 1, options == 2);
      });
    }
  }
  bool right = true;
  std::printf("%-32s float16 bfloat16  float32  float64\n", "");
  for (const auto& [op, errors] : largest) {
    const bool passes = *std::max_element(errors, errors + 4) <= 1;
    std::printf("batch_norm_%-16s%-7s", op.c_str(), passes ? "ok" : "DIFFERS");
    std::printf("%5.2f%9.2f%9.2f%9.2f\n", errors[0], errors[1], errors[2], errors[3]);
    right &= passes;
  }
  return right ? 0 : 1;
}
