// Dropout's masks: which elements are kept is a function of the row's key and the column's index, with 32 bits of
// randomness per element. Bit for bit the generator of megazero/ops/counter_random/keep.py, which explains it.
#pragma once

#include <cstdint>

#include "common/cuda_splitmix.hpp"

namespace megazero {

// A column's share of the hash.
__device__ __forceinline__ std::uint32_t keep_column(std::int64_t index) {
  return static_cast<std::uint32_t>(mix_64(static_cast<std::uint64_t>(index + 1) * kGoldenGamma));
}

// A row's share of the hash.
struct KeepRow {
  std::uint32_t low, odd_high;

  static __device__ __forceinline__ KeepRow of(std::int64_t key) {
    const std::uint64_t row = mix_64(static_cast<std::uint64_t>(key) + kGoldenGamma);
    return {static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(row >> 32) | 1u};
  }

  // Whether the element is kept; threshold = round(p 2^32) - 2^31.
  __device__ __forceinline__ bool keeps(std::uint32_t column, std::int32_t threshold) const {
    std::uint32_t x = (low + column) * odd_high;
    x = (x ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(x) >> 16)) * 0x7FEB352Du;
    return static_cast<std::int32_t>(x) >= threshold;
  }
};

// The rows of hidden states [s, b, h] as dropout knows them (megazero/ops/dropout.py): row i of sequence j has the key
// keys[j] or keys[i, j], and the position positions[i] or positions[i, j], or without them first + i step.
struct RowKeys {
  Cached<std::int64_t> keys, positions;  // no keys: nothing is dropped
  std::int64_t first, step;
  std::uint64_t site;  // the mixed constant of a place in the model, which keys are derived from
  std::uint32_t sequences;
  bool key_of_row, position_of_row, has_site;

  __device__ __forceinline__ KeepRow of(std::int64_t row) const {
    if (!keys) return KeepRow::of(0);
    const std::uint32_t place = static_cast<std::uint32_t>(row) / sequences;
    std::int64_t key = keys[key_of_row ? row : row - std::int64_t{place} * sequences];
    if (has_site) key = static_cast<std::int64_t>(derive(site, key));
    std::int64_t position = first + place * step;
    if (positions) position = positions[position_of_row ? row : place];
    return KeepRow::of(static_cast<std::int64_t>(derive(mix_64(static_cast<std::uint64_t>(key)), position)));
  }
};

}  // namespace megazero
