// Places of a keyed permutation, without an array of it.
//
// Twin of `_permuted` in megazero/data/shuffle.py.
#pragma once

#include <array>
#include <cstdint>

namespace megazero::data {

// A permutation of 0..count-1: a Feistel network over the next power of two, which a number outside goes through again.
class Permutation {
 public:
  static constexpr std::size_t kRounds = 16;

  Permutation(std::uint64_t count, const std::array<std::uint64_t, kRounds>& keys) : count_(count), keys_(keys) {
    unsigned bits = 1;
    while (bits < 64 && (count - 1) >> bits != 0) {
      ++bits;
    }
    width_ = bits - bits / 2;
    low_mask_ = (std::uint64_t{1} << width_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits / 2)) - 1;
  }

  std::uint64_t operator[](std::uint64_t place) const {
    do {
      place = through(place);
    } while (place >= count_);
    return place;
  }

 private:
  static std::uint64_t mixed(std::uint64_t value, std::uint64_t key) {
    value = value * 0x9E3779B97F4A7C15U + key;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
  }

  std::uint64_t through(std::uint64_t value) const {
    std::uint64_t high = value >> width_;
    std::uint64_t low = value & low_mask_;
    for (std::size_t round = 0; round < kRounds; round += 2) {
      low ^= mixed(high, keys_[round]) & low_mask_;
      high ^= mixed(low, keys_[round + 1]) & high_mask_;
    }
    return high << width_ | low;
  }

  std::uint64_t count_;
  std::array<std::uint64_t, kRounds> keys_;
  unsigned width_ = 0;
  std::uint64_t low_mask_ = 0;
  std::uint64_t high_mask_ = 0;
};

}  // namespace megazero::data
