// SplitMix64 (Steele, Lea & Flood 2014): random bits as a function of a key and a number, as
// megazero/ops/counter_random/splitmix.py has it.
#pragma once

#include <cstdint>

#include "common/cuda.hpp"

namespace megazero {

constexpr std::uint64_t kGoldenGamma = 0x9E3779B97F4A7C15ull;

// The output function.
__device__ __forceinline__ std::uint64_t mix_64(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

// A stream of its own for each key: `start` is the mixed key.
__device__ __forceinline__ std::uint64_t derive(std::uint64_t start, std::int64_t index) {
  return mix_64(static_cast<std::uint64_t>(index + 1) * kGoldenGamma + start);
}

}  // namespace megazero
