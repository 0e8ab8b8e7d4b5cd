// Masks as bytes.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../layout.h"

namespace bagua_syncbn::cpu {

// Returns a byte for each position of (batch, inner): 1 if it is valid, else 0. Empty without a mask.
inline std::vector<uint8_t> positions_of(const Mask* mask, int64_t batch) {
  if (mask == nullptr) return {};
  constexpr int64_t kBehind = 64;  // the loops read up to a vector beyond the end
  const int64_t n = batch * mask->inner;
  std::vector<uint8_t> bytes(n + kBehind);
  if (mask->positions != nullptr) std::copy_n(mask->positions, n, bytes.data());
  for (int64_t j = 0; mask->positions == nullptr && j < n; j += mask->length) {
    std::fill_n(&bytes[j], std::clamp<int64_t>(mask->lengths[j / mask->inner], 0, mask->length), 1);
  }
  return bytes;
}

// Returns the sum of n bytes, each 1 or 0. Adds 8 bytes at a time, which do not overflow in 255 additions.
inline int64_t count_of(const uint8_t* valid, int64_t n) {
  constexpr int64_t kWord = 8, kMost = 255;
  int64_t count = 0, j = 0;
  while (j + kWord <= n) {
    const int64_t words = std::min(kMost, (n - j) / kWord);
    uint64_t sums = 0;
    for (int64_t w = 0; w < words; ++w, j += kWord) {
      uint64_t word;
      std::memcpy(&word, valid + j, kWord);
      sums += word;
    }
    constexpr uint64_t kEven = 0x00ff00ff00ff00ff;
    count += static_cast<int64_t>(((sums & kEven) + (sums >> 8 & kEven)) * 0x0001000100010001 >> 48);
  }
  for (; j < n; ++j) count += valid[j];
  return count;
}

}  // namespace bagua_syncbn::cpu
