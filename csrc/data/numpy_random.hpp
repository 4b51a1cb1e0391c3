// numpy.random.RandomState, as far as samples need it, bit for bit.
//
// The generator is the 32-bit Mersenne Twister (Matsumoto & Nishimura 1998). What numpy makes of its numbers is frozen
// by numpy's promise that RandomState never changes.
#pragma once

#include <array>
#include <cstdint>

namespace megazero::data {

class NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed) {
    for (std::uint32_t i = 0; i < kWords; ++i) {
      state_[i] = seed;
      seed = 1812433253U * (seed ^ (seed >> 30)) + i + 1;
    }
  }

  std::uint32_t next() {
    if (at_ == kWords) {
      turn();
    }
    std::uint32_t x = state_[at_++];
    x ^= x >> 11;
    x ^= (x << 7) & 0x9d2c5680U;
    x ^= (x << 15) & 0xefc60000U;
    return x ^ (x >> 18);
  }

  // random_sample(): 53 random bits in [0, 1).
  double real() {
    const std::uint32_t high = next() >> 5;
    const std::uint32_t low = next() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }

  // randint(0, count), and the draws of shuffle: rejection under the mask that covers count - 1. No draw for count 1.
  std::uint32_t below(std::uint32_t count) {
    const std::uint32_t largest = count - 1;
    if (largest == 0) {
      return 0;
    }
    std::uint32_t mask = largest;
    for (int shift = 1; shift < 32; shift *= 2) {
      mask |= mask >> shift;
    }
    std::uint32_t value = next() & mask;
    while (value > largest) {
      value = next() & mask;
    }
    return value;
  }

 private:
  static constexpr std::uint32_t kWords = 624;
  static constexpr std::uint32_t kAhead = 397;

  static std::uint32_t twisted(std::uint32_t high, std::uint32_t low) {
    const std::uint32_t mixed = (high & 0x80000000U) | (low & 0x7fffffffU);
    return (mixed >> 1) ^ ((low & 1U) * 0x9908b0dfU);
  }

  void turn() {
    std::uint32_t i = 0;
    for (; i < kWords - kAhead; ++i) {
      state_[i] = state_[i + kAhead] ^ twisted(state_[i], state_[i + 1]);
    }
    for (; i < kWords - 1; ++i) {
      state_[i] = state_[i + kAhead - kWords] ^ twisted(state_[i], state_[i + 1]);
    }
    state_[kWords - 1] = state_[kAhead - 1] ^ twisted(state_[kWords - 1], state_[0]);
    at_ = 0;
  }

  std::array<std::uint32_t, kWords> state_;
  std::uint32_t at_ = kWords;
};

}  // namespace megazero::data
