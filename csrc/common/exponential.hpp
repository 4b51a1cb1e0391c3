// exp and the logistic function without branches or tables, so that loops over them can be vectorized.
#pragma once

#include <cstdint>
#include <limits>

#include "common/clones.hpp"
#include "common/numbers.hpp"

namespace megazero {

// exp(x) with a relative error of 2e-7, for x between -87 and 88 or NaN.
//
// x = n ln 2 + r with n whole and |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves no room for a fraction, so it rounds to
// n, in the low bits of the sum; n ln 2 is subtracted in two parts, the first exact. e^r is a polynomial fitted for
// least relative error (3e-9), and 2^n is made in the exponent bits.
MEGAZERO_INLINE float exponential_within(float x) {
  constexpr float magic = 0x1.8p23f;
  const float shifted = x * 0x1.715476p0f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
  float p = 0x1.6a23d0p-10f;
  p = p * r + 0x1.123a20p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * bits_as<float>((bits_as<std::uint32_t>(shifted) << 23) + (127u << 23));
}

// exp of x below 88, as all logarithms of probabilities are; 0 below -87, about where floats become denormal, which
// cost a hundred cycles each.
MEGAZERO_INLINE float exponential_below(float x) {
  const float within = exponential_within(x);
  return x < -87.0f ? 0.0f : within;
}

// exp of any x: as above, and infinity above 88.
MEGAZERO_INLINE float exponential(float x) {
  const float below = exponential_below(x);
  return x > 88.0f ? std::numeric_limits<float>::infinity() : below;
}

// 1 / (1 + exp(-x)): 0 and 1 at the ends, and NaN for NaN.
MEGAZERO_INLINE float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace megazero
