// The merge of moments of parts of a channel.
#pragma once

#include "loops.h"

namespace bagua_syncbn::cpu {

// Chan, Golub and LeVeque: adds the moments of `added` values to those of `count`.
struct Merge {
  double share;   // of the added values in all of them
  double weight;  // of the squared difference of the means
  Merge(double count, double added) : share(added / (count + added)), weight(count * share) {}

  void operator()(double& mean, double& m2, double added_mean, double added_m2) const {
    const double difference = added_mean - mean;
    mean += difference * share;
    m2 += added_m2 + difference * difference * weight;
  }
};

struct CountedMoments {
  double count = 0;
  Moments moments;

  void add(double added, const Moments& other) {
    if (added == 0) return;
    Merge(count, added)(moments.mean, moments.m2, other.mean, other.m2);
    count += added;
  }
};

// Adds moments of `added` values per channel, [mean (C) | m2 (C)], to those of `count`.
inline void add_columns(double* all, double count, const double* part, double added, int64_t channels) {
  if (added == 0) return;
  const Merge merge(count, added);
  for (int64_t c = 0; c < channels; ++c) merge(all[c], all[channels + c], part[c], part[channels + c]);
}

}  // namespace bagua_syncbn::cpu
