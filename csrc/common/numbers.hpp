// Elements as stored in memory, read as float and written back; all arithmetic is done in float.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/clones.hpp"

namespace megazero {

// The upper half of a float.
struct Bf16 {
  std::uint16_t bits;
};

template <typename To, typename From>
MEGAZERO_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

MEGAZERO_INLINE float load(const float* from) { return *from; }

MEGAZERO_INLINE float load(const Bf16* from) {
  return bits_as<float>(static_cast<std::uint32_t>(from->bits) << 16);
}

MEGAZERO_INLINE void store(float value, float* to) { *to = value; }

// Rounds to the nearest, ties to even: adding just under half a unit carries into the upper half where it should, and a
// carry out of the significand rightly raises the exponent, up to infinity. A NaN must not carry, so it is replaced.
MEGAZERO_INLINE void store(float value, Bf16* to) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to->bits = static_cast<std::uint16_t>((value != value ? 0x7fc00000u : rounded) >> 16);
}

// Calls body with an element of the type in question, so that it knows the type.
template <typename Body>
void with_element(bool narrow, const Body& body) {
  if (narrow) {
    body(Bf16{});
  } else {
    body(0.0f);
  }
}

}  // namespace megazero
