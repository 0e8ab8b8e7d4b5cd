// Packs, unpacks and checks messages between ranks. bagua_syncbn/_ops/headers.py describes their layout.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace bagua_syncbn {

constexpr int64_t kWord = int64_t(1) << 24;     // float32 represents all integers up to this exactly
constexpr int64_t kMaxHigh = int64_t(1) << 29;  // for counts up to 2^53, which float64 represents exactly

// Header sizes: rows have three words, sums have three parts that are each followed by their square.
constexpr int64_t kRowHeader = 3;
constexpr int64_t kSumsHeader = 6;
constexpr int64_t kMaxPart = 0xfff;

// Integers at the end of a message that identify it. All ranks must send the same header.
struct Header {
  int64_t size = 0;
  int32_t words[kSumsHeader] = {};
};

// True for statistics to be summed, [n * mean | m2 + n * mean^2 | n | header] in double, which ranks add. Otherwise
// they gather rows, [mean | biased variance | count in two words | header].
BAGUA_SYNCBN_HOST_DEVICE constexpr bool is_summed(const Header& header) {
  return header.size == kSumsHeader;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void pack_header(A* target, const Header& header) {
#if defined(__CUDA_ARCH__)
#pragma unroll  // runtime indexing would put the header into local memory
#endif
  for (int64_t w = 0; w < kSumsHeader; ++w) {
    if (w < header.size) target[w] = static_cast<A>(header.words[w]);
  }
}

BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t row_size_of(int64_t channels, int64_t header_size) {
  return 2 * channels + 2 + header_size;
}

BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t sums_size_of(int64_t channels) {
  return 2 * channels + 1 + kSumsHeader;
}

// Returns the header size of a row. Rows without a header have an even size.
BAGUA_SYNCBN_HOST_DEVICE constexpr int64_t header_size_of(int64_t row_size) {
  return row_size % 2 ? kRowHeader : 0;
}

// Writes the moments of channel `c`. Channel 0 also writes count and header. `A`: the accumulate dtype.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void pack_moments(void* packed, int64_t channels, int64_t c, double mean, double m2,
                                           double count, const Header& header) {
  if (is_summed(header)) {
    double* sums = static_cast<double*>(packed);
    sums[c] = count * mean;
    sums[channels + c] = m2 + count * mean * mean;
    if (c > 0) return;
    sums[2 * channels] = count;
    pack_header(sums + 2 * channels + 1, header);
  } else {
    A* row = static_cast<A*>(packed);
    row[c] = static_cast<A>(mean);
    row[channels + c] = static_cast<A>(count > 0 ? m2 / count : 0);
    if (c > 0) return;
    row[2 * channels] = static_cast<A>(static_cast<int64_t>(count) % kWord);
    row[2 * channels + 1] = static_cast<A>(static_cast<int64_t>(count) / kWord);
    pack_header(row + 2 * channels + 2, header);
  }
}

// Computes mean and variance of channel `c` from sums over all ranks. `inverse`: 1 / count. Rounding in the subtraction
// may give a negative variance, which is replaced by 0. NaN stays NaN.
BAGUA_SYNCBN_HOST_DEVICE inline void unpack_moments(const double* sums, int64_t channels, int64_t c, double inverse,
                                                    double& mean, double& var) {
  mean = sums[c] * inverse;
  const double difference = sums[channels + c] * inverse - mean * mean;
  var = difference < 0 ? 0 : difference;
}

template <typename A>
BAGUA_SYNCBN_HOST_DEVICE int64_t unpack_count(const A* row, int64_t channels) {
  return static_cast<int64_t>(row[2 * channels]) + static_cast<int64_t>(row[2 * channels + 1]) * kWord;
}

// True if `value` is an integer from 0 to `max`.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE bool is_integer(A value, int64_t max) {
  if (!(value >= A(0) && value <= static_cast<A>(max))) return false;  // also for NaN
  return static_cast<A>(static_cast<int64_t>(value)) == value;
}

// Faults that the ops record, see bagua_syncbn/_ops/__init__.py.
struct Fault {
  enum Kind : int64_t { kNone, kHeader, kCount, kSum };
  int64_t kind = kNone;
  int64_t where = 0;  // rank; for kSum the number of the message
};

// Compares a rank's row with rank 0's.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE Fault::Kind fault_of(const A* row, const A* first, int64_t channels, int64_t header_size) {
  const A *own = row + 2 * channels, *expected = first + 2 * channels;
  bool same = true;
#if defined(__CUDA_ARCH__)
#pragma unroll  // issues all loads before waiting
#endif
  for (int64_t w = 0; w < kRowHeader; ++w) {
    if (w < header_size) same &= own[2 + w] == expected[2 + w];
  }
  const bool is_count = is_integer(own[0], kWord - 1) && is_integer(own[1], kMaxHigh);
  return !same ? Fault::kHeader : !is_count ? Fault::kCount : Fault::kNone;
}

// Returns the first rank whose header differs from rank 0's, else the first rank with an invalid count.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE Fault find_fault(const A* gathered, int64_t ranks, int64_t channels, int64_t header_size) {
  Fault fault;
  for (int64_t r = 0; r < ranks; ++r) {
    const A* row = gathered + r * row_size_of(channels, header_size);
    const Fault::Kind kind = fault_of(row, gathered, channels, header_size);
    if (kind == Fault::kHeader) return {kind, r};
    if (kind == Fault::kCount && fault.kind == Fault::kNone) fault = {kind, r};
  }
  return fault;
}

// True if all ranks sent the same header part, given the sums of the part and of its square: the mean of squares equals
// the squared mean only if all values are equal.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE bool sums_agree(A sum, A squares, int64_t ranks) {
  if (!is_integer(sum, ranks * kMaxPart) || !is_integer(squares, ranks * kMaxPart * kMaxPart)) return false;
  const auto part = static_cast<int64_t>(sum);
  return static_cast<int64_t>(squares) * ranks == part * part;
}

// True if all ranks sent the same header.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE bool sums_headers_agree(const A* header, int64_t size, int64_t ranks) {
  bool same = true;
  for (int64_t w = 0; w + 1 < size; w += 2) same &= sums_agree(header[w], header[w + 1], ranks);
  return same;
}

// Checks the statistics that `ranks` summed.
BAGUA_SYNCBN_HOST_DEVICE inline Fault fault_of_sums(const double* sums, int64_t channels, int64_t ranks,
                                                    int64_t message_number) {
  const double* count = sums + 2 * channels;
  if (sums_headers_agree(count + 1, kSumsHeader, ranks) && is_integer(*count, kMaxHigh * kWord)) return {};
  return {Fault::kSum, message_number};
}

// Writes `fault` to `record`; for a row, also the headers of rank 0 and of the row. No-op if `record` is null or has an
// earlier fault. Writes the kind last, because the host polls it.
template <typename A>
BAGUA_SYNCBN_HOST_DEVICE void record_fault(int64_t* record, const Fault& fault, const A* gathered, int64_t channels,
                                           int64_t header_size) {
  if (fault.kind == Fault::kNone || record == nullptr || record[0] != Fault::kNone) return;
  record[1] = fault.where;
  for (int64_t w = 0; fault.kind != Fault::kSum && w < header_size; ++w) {
    const A* first = gathered + 2 * channels + 2 + w;
    record[2 + w] = static_cast<int64_t>(first[0]);
    record[2 + header_size + w] = static_cast<int64_t>(first[fault.where * row_size_of(channels, header_size)]);
  }
#if defined(__CUDA_ARCH__) || defined(BAGUA_SYNCBN_IN_EMULATOR)
  __threadfence_system();
#endif
  record[0] = fault.kind;
}

}  // namespace bagua_syncbn
