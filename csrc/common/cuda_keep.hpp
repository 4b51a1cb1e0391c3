// Dropout's masks: which elements are kept is a function of the row's key and the column's index, with 32 bits of
// randomness per element. Bit for bit the generator of megazero/ops/counter_random/keep.py, which explains it.
#pragma once

#include <cstdint>

#include "common/cuda.hpp"

namespace megazero {

constexpr std::uint64_t kGoldenGamma = 0x9E3779B97F4A7C15ull;

// SplitMix64's output function (Steele, Lea & Flood 2014).
__device__ __forceinline__ std::uint64_t mix_64(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

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

}  // namespace megazero
