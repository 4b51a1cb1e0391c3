// Rounding to 8-bit floats (Micikevicius et al. 2022), spelled in integers and in operations that no compiler fuses, so
// that every device gives the same bits.
#pragma once

#include "common/cuda.hpp"

namespace megazero {

// A sign, EXPONENT bits and DIGITS bits of significand. The largest number of e4m3 is not followed by infinity.
template <int EXPONENT, int DIGITS>
struct Fp8 {
  static constexpr int kBias = (1 << (EXPONENT - 1)) - 1;
  static constexpr int kLost = 23 - DIGITS;  // bits of a float's significand
  static constexpr unsigned kNan = 0x7fu;

  static __device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
  }

  static __device__ __forceinline__ float largest() { return EXPONENT == 4 ? 448.0f : 57344.0f; }

  // To the nearest, ties to even; what is too large becomes the largest. x is no NaN. Below the smallest normal number
  // codes are multiples of 2^(1 - kBias - DIGITS), as are floats next to a higher power of two.
  static __device__ __forceinline__ unsigned code(float x) {
    const unsigned bits = __float_as_uint(x);
    const float absolute = __uint_as_float(bits & 0x7fffffffu);
    const float within = absolute > largest() ? largest() : absolute;
    const unsigned kept = __float_as_uint(within);
    const float step = power_of_two(1 - kBias + kLost);
    const unsigned small = __float_as_uint(__fadd_rn(within, step)) - __float_as_uint(step);
    const unsigned half = (1u << (kLost - 1)) - 1u;
    const unsigned normal = ((kept + half + (kept >> kLost & 1u)) >> kLost) - (unsigned{127 - kBias} << DIGITS);
    return (within < power_of_two(1 - kBias) ? small : normal) | (bits >> 24 & 0x80u);
  }
};

using E4m3 = Fp8<4, 3>;
using E5m2 = Fp8<5, 2>;

}  // namespace megazero
