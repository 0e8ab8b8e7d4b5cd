// batch_norm_gather_stats: merges the statistics of all ranks and updates the running statistics.

#include <algorithm>
#include <cmath>
#include <limits>

#include "channels.h"
#include "kernels.h"

namespace bagua_syncbn::cpu {
namespace {

// Writes mean and biased variance of each channel to `mean` and `var`, which must be zeros. Returns the number of
// values per channel. Merges in rank order, so that all ranks get the same bits.
template <typename A>
int64_t merge_ranks(const A* gathered, int64_t ranks, int64_t channels, int64_t size, std::vector<double>& mean,
                    std::vector<double>& var) {
  int64_t total = 0;
  for (int64_t r = 0; r < ranks; ++r) total += unpack_count(gathered + r * size, channels);
  const auto for_each_rank = [&](const auto& add) {
    for (int64_t r = 0; r < ranks; ++r) {
      const A* row = gathered + r * size;
      const double share = static_cast<double>(unpack_count(row, channels)) / std::max<int64_t>(total, 1);
      for (int64_t c = 0; c < channels; ++c) add(c, share, row[c], row[channels + c]);
    }
  };
  for_each_rank([&](int64_t c, double share, A rank_mean, A) { mean[c] += share * rank_mean; });
  for_each_rank([&](int64_t c, double share, A rank_mean, A rank_var) {
    const double difference = rank_mean - mean[c];
    var[c] += share * (rank_var + difference * difference);
  });
  return total;
}

// Computes the same results from sums over ranks.
int64_t divide_sums(const double* sums, int64_t channels, std::vector<double>& mean, std::vector<double>& var) {
  const double count = sums[2 * channels], inverse = 1 / std::max(count, 1.0);
  for (int64_t c = 0; c < channels; ++c) unpack_moments(sums, channels, c, inverse, mean[c], var[c]);
  return static_cast<int64_t>(count);
}

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

}  // namespace

void gather_stats(const GatherArguments& arguments, Device&) {
  const int64_t channels = arguments.channels, header_size = arguments.header_size;
  dispatch(arguments.accumulate, [&](auto zero) {
    using A = Accumulate<decltype(zero)>;
    std::vector<double> mean(channels), var(channels);
    const A* rows = static_cast<const A*>(arguments.gathered);
    const double* sums = static_cast<const double*>(arguments.gathered);
    const Fault found = arguments.summed ? fault_of_sums(sums, channels, arguments.ranks, arguments.message_number)
                                         : find_fault(rows, arguments.ranks, channels, header_size);
    record_fault(arguments.fault, found, rows, channels, header_size);
    int64_t total = 0;
    if (found.kind == Fault::kNone) {
      total = arguments.summed
                  ? divide_sums(sums, channels, mean, var)
                  : merge_ranks(rows, arguments.ranks, channels, row_size_of(channels, header_size), mean, var);
    } else {
      mean.assign(channels, std::numeric_limits<double>::quiet_NaN());
      var = mean;
    }
    *arguments.count = total;
    for (int64_t c = 0; c < channels; ++c) {
      static_cast<A*>(arguments.mean)[c] = static_cast<A>(mean[c]);
      static_cast<A*>(arguments.invstd)[c] = static_cast<A>(1 / std::sqrt(var[c] + arguments.eps));
    }
    if (total < 2) return;  // no unbiased variance
    if (arguments.skip_nonfinite && !(all_finite(mean) && all_finite(var))) return;
    if (arguments.batches != nullptr) ++*arguments.batches;
    if (arguments.running_mean.data == nullptr) return;
    const double factor = arguments.averages ? 1.0 / std::max<int64_t>(*arguments.batches, 1) : arguments.momentum;
    const auto move = [&](const MutablePerChannel& running, const std::vector<double>& values) {
      write_channels(running, channels, [&](int64_t c, double old) { return old + factor * (values[c] - old); });
    };
    move(arguments.running_mean, mean);
    for (double& each : var) each *= static_cast<double>(total) / (total - 1);
    move(arguments.running_var, var);
  });
}

}  // namespace bagua_syncbn::cpu
