// IEEE half precision in portable C++: conversions with the GPU's rounding (nearest, ties to even).
#pragma once

#include <cstdint>

#include "common/numbers.hpp"

namespace megazero {

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u) return bits_as<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float denormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -denormal : denormal;
}

inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24: adding 0.5, whose spacing that is, lets the CPU do the rounding.
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return sign | static_cast<std::uint16_t>(bits_as<std::uint32_t>(shifted) - 0x3f000000u);
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return sign | static_cast<std::uint16_t>(rounded >> 13);
}

}  // namespace megazero
