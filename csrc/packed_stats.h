// Layout of what ranks send, see bagua_syncbn/ops/words.py, and what is wrong with what they sent.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace bagua_syncbn {

constexpr int64_t kWord = int64_t(1) << 24;     // above each word: float32 holds every integer up to it
constexpr int64_t kMaxHigh = int64_t(1) << 29;  // counts up to 2^53, which float64 holds exactly

// Words of what is added up over ranks, and of a row that is gathered, at most.
constexpr int64_t kMostWords = 6;
constexpr int64_t kMostGatheredWords = 3;
constexpr int64_t kMostOfPart = 0xfff;  // of a word that is added up

struct Words {
  int64_t count = 0;
  int32_t values[kMostWords] = {};
};

// Whether statistics with these words add up over ranks: [n * mean | m2 + n * mean^2 | n | words], in double.
BAGUA_SYNCBN_HOST_DEVICE constexpr bool adds_up(const Words& words) {
  return words.count == kMostWords;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void pack_words(A* target, const Words& words) {
#if defined(__CUDA_ARCH__)
#pragma unroll  // an index known when it is compiled: else the words are copied to local memory
#endif
  for (int64_t w = 0; w < kMostWords; ++w) {
    if (w < words.count) target[w] = static_cast<A>(words.values[w]);
  }
}

BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t packed_size(int64_t channels, int64_t words) {
  return 2 * channels + 2 + words;
}

// The size of what adds up over ranks.
BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t summed_size(int64_t channels) {
  return 2 * channels + 1 + kMostWords;
}

// How many words a row of `size` values ends in: a row without words has an even size.
BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t words_in(int64_t size) {
  return size % 2 ? kMostGatheredWords : 0;
}

BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t packed_channels(int64_t size, int64_t words) {
  return (size - 2 - words) / 2;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void pack_count(A* packed, int64_t channels, int64_t count, const Words& words) {
  packed[2 * channels] = static_cast<A>(count % kWord);
  packed[2 * channels + 1] = static_cast<A>(count / kWord);
  pack_words(packed + 2 * channels + 2, words);
}

// Writes the moments of channel `c`, with those of channel 0 count and words. `A`: the accumulate dtype.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void pack_moments(void* packed, int64_t channels, int64_t c, double mean, double m2,
                                           double count, const Words& words) {
  if (adds_up(words)) {
    double* sums = static_cast<double*>(packed);
    sums[c] = count * mean;
    sums[channels + c] = m2 + count * mean * mean;
    if (c > 0) return;
    sums[2 * channels] = count;
    pack_words(sums + 2 * channels + 1, words);
  } else {
    A* row = static_cast<A*>(packed);
    row[c] = static_cast<A>(mean);
    row[channels + c] = static_cast<A>(count > 0 ? m2 / count : 0);
    if (c == 0) pack_count(row, channels, static_cast<int64_t>(count), words);
  }
}

// Sets mean and variance of channel `c`, given what ranks have added up, and the inverse of their count. Subtraction
// may leave a variance below 0, which NaN is not.
BAGUA_SYNCBN_HOST_DEVICE inline void unpack_moments(const double* sums, int64_t channels, int64_t c, double inverse,
                                                    double& mean, double& var) {
  mean = sums[c] * inverse;
  const double difference = sums[channels + c] * inverse - mean * mean;
  var = difference < 0 ? 0 : difference;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE int64_t unpack_count(const A* packed, int64_t channels) {
  return static_cast<int64_t>(packed[2 * channels]) + static_cast<int64_t>(packed[2 * channels + 1]) * kWord;
}

// Whether `value` is an integer from 0 to `most`.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE bool is_integer(A value, int64_t most) {
  if (!(value >= A(0) && value <= static_cast<A>(most))) return false;  // NaN too
  return static_cast<A>(static_cast<int64_t>(value)) == value;
}

// Faults that the ops write down, see bagua_syncbn/ops/__init__.py.
struct Fault {
  enum Kind : int64_t { kNone, kWords, kCount, kSum };
  int64_t kind = kNone;
  int64_t where = 0;  // rank, or call
};

// The fault of a rank's row, compared with the row of rank 0.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE Fault::Kind fault_of(const A* row, const A* first, int64_t channels, int64_t words) {
  const A *own = row + 2 * channels, *expected = first + 2 * channels;
  bool same = true;
#if defined(__CUDA_ARCH__)
#pragma unroll  // all are loaded before the first is waited for
#endif
  for (int64_t w = 0; w < kMostGatheredWords; ++w) {
    if (w < words) same &= own[2 + w] == expected[2 + w];
  }
  const bool counts = is_integer(own[0], kWord - 1) && is_integer(own[1], kMaxHigh);
  return !same ? Fault::kWords : !counts ? Fault::kCount : Fault::kNone;
}

// The first rank with other words than rank 0; else the first with a count that is none.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE Fault find_fault(const A* gathered, int64_t ranks, int64_t channels, int64_t words) {
  Fault fault;
  for (int64_t r = 0; r < ranks; ++r) {
    const Fault::Kind kind = fault_of(gathered + r * packed_size(channels, words), gathered, channels, words);
    if (kind == Fault::kWords) return {kind, r};
    if (kind == Fault::kCount && fault.kind == Fault::kNone) fault = {kind, r};
  }
  return fault;
}

// Whether a word was the same on all ranks, by the sums of it and of its square: only then is the mean of the squares
// the square of the mean.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE bool same_word(A sum, A squares, int64_t ranks) {
  if (!is_integer(sum, ranks * kMostOfPart) || !is_integer(squares, ranks * kMostOfPart * kMostOfPart)) return false;
  const auto word = static_cast<int64_t>(sum);
  return static_cast<int64_t>(squares) * ranks == word * word;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE bool same_words(const A* words, int64_t count, int64_t ranks) {
  bool same = true;
  for (int64_t w = 0; w + 1 < count; w += 2) same &= same_word(words[w], words[w + 1], ranks);
  return same;
}

// The fault of statistics that `ranks` have added up in a `call`.
BAGUA_SYNCBN_HOST_DEVICE inline Fault fault_of_sums(const double* sums, int64_t channels, int64_t ranks, int64_t call) {
  const double* count = sums + 2 * channels;
  if (same_words(count + 1, kMostWords, ranks) && is_integer(*count, kMaxHigh * kWord)) return {};
  return {Fault::kSum, call};
}

// Writes `fault` to `record`, which may be null, with the words of rows if it is one of those. Keeps an earlier fault.
// Writes the kind last: the host polls it.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void record_fault(int64_t* record, const Fault& fault, const A* gathered, int64_t channels,
                                           int64_t words) {
  if (fault.kind == Fault::kNone || record == nullptr || record[0] != Fault::kNone) return;
  record[1] = fault.where;
  for (int64_t w = 0; fault.kind != Fault::kSum && w < words; ++w) {
    const A* own = gathered + 2 * channels + 2 + w;
    record[2 + w] = static_cast<int64_t>(own[0]);
    record[2 + words + w] = static_cast<int64_t>(own[fault.where * packed_size(channels, words)]);
  }
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#endif
  record[0] = fault.kind;
}

}  // namespace bagua_syncbn
