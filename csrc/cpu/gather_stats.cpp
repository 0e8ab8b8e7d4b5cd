// batch_norm_gather_stats: the statistics of all ranks together, and the running ones.

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "../allocate.h"
#include "../checks.h"
#include "../packed_stats.h"
#include "channels.h"

namespace bagua_syncbn::cpu {
namespace {

// Adds mean and biased variance of each channel over all ranks, in double, to zeros; returns the number of values per
// channel. Ranks are merged at once by their shares, in rank order: all ranks get the same bits.
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

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

void update_running(Tensor running, const std::vector<double>& values, double factor) {
  const Tensor target = dense(running);
  dispatch_floating(scalar_type(running), "running", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* data = static_cast<T*>(target.mutable_data_ptr());
    for (size_t c = 0; c < values.size(); ++c) {
      const double old = static_cast<double>(data[c]);
      data[c] = static_cast<T>(static_cast<Accumulate<T>>(old + factor * (values[c] - old)));
    }
  });
  if (target.get() != running.get()) torch::stable::copy_(running, target);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> batch_norm_gather_stats(const Tensor& gathered,
                                                           const std::optional<Tensor>& running_mean,
                                                           const std::optional<Tensor>& running_var,
                                                           const std::optional<Tensor>& num_batches_tracked,
                                                           std::optional<double> momentum, double eps,
                                                           const std::optional<Tensor>& fault, bool skip_nonfinite) {
  check_gather_stats(gathered, running_mean, running_var, num_batches_tracked, momentum, fault);
  const int64_t ranks = gathered.size(0), size = gathered.size(1);
  const int64_t words = words_in(size), channels = packed_channels(size, words);
  Tensor mean = allocate_vector(channels, scalar_type(gathered), gathered);
  Tensor invstd = allocate_vector(channels, scalar_type(gathered), gathered);
  Tensor count = allocate_scalar(ScalarType::Long, gathered);
  const Tensor rows = dense(gathered);
  dispatch_floating(scalar_type(gathered), "gathered", [&](auto tag) {
    using A = Accumulate<typename decltype(tag)::type>;
    std::vector<double> merged_mean(channels), merged_var(channels);
    const A* data = static_cast<const A*>(rows.const_data_ptr());
    const Fault found = find_fault(data, ranks, channels, words);
    record_fault(record_of(fault), found, data, channels, words);
    int64_t total = 0;
    if (found.kind == Fault::kNone) {
      total = merge_ranks(data, ranks, channels, size, merged_mean, merged_var);
    } else {
      merged_mean.assign(channels, std::numeric_limits<double>::quiet_NaN());
      merged_var = merged_mean;
    }
    *static_cast<int64_t*>(count.mutable_data_ptr()) = total;
    A* mean_out = static_cast<A*>(mean.mutable_data_ptr());
    A* invstd_out = static_cast<A*>(invstd.mutable_data_ptr());
    for (int64_t c = 0; c < channels; ++c) {
      mean_out[c] = static_cast<A>(merged_mean[c]);
      invstd_out[c] = static_cast<A>(1 / std::sqrt(merged_var[c] + eps));
    }
    if (total < 2) return;  // no unbiased variance
    if (skip_nonfinite && !(all_finite(merged_mean) && all_finite(merged_var))) return;
    int64_t batches = 1;
    if (num_batches_tracked) batches = ++*static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
    if (!running_mean || !running_var) return;
    const double factor = momentum.value_or(1.0 / std::max<int64_t>(batches, 1));
    for (double& var : merged_var) var *= static_cast<double>(total) / (total - 1);
    update_running(*running_mean, merged_mean, factor);
    update_running(*running_var, merged_var, factor);
  });
  return {mean, invstd, count};
}

}  // namespace bagua_syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(bagua_syncbn, CPU, m) {
  m.impl("batch_norm_gather_stats", TORCH_BOX(&bagua_syncbn::cpu::batch_norm_gather_stats));
}
