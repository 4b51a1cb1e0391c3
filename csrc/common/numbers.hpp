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

// IEEE's half precision: 5 bits of exponent, 10 of significand.
struct Fp16 {
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

// Normal numbers get the float's bias of the exponent; denormal ones are multiples of 2^-24.
MEGAZERO_INLINE float load(const Fp16* from) {
  const std::uint32_t size = from->bits & 0x7fffu;
  const float normal = bits_as<float>((size << 13) + (112u << 23));
  const float denormal = static_cast<float>(static_cast<std::int32_t>(size)) * 0x1p-24f;
  const float special = bits_as<float>((size << 13) | 0x7f800000u);
  const float found = size < 0x400u ? denormal : (size < 0x7c00u ? normal : special);
  return bits_as<float>(bits_as<std::uint32_t>(found) | static_cast<std::uint32_t>(from->bits & 0x8000u) << 16);
}

MEGAZERO_INLINE void store(float value, float* to) { *to = value; }

// Rounds to the nearest bf16, ties to even, in the upper half: adding just under half a unit carries into it where it
// should, and a carry out of the significand rightly raises the exponent, up to infinity. A NaN must not carry, so it
// is replaced.
MEGAZERO_INLINE std::uint32_t rounded_to_bf16(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? 0x7fc00000u : rounded;
}

MEGAZERO_INLINE void store(float value, Bf16* to) {
  to->bits = static_cast<std::uint16_t>(rounded_to_bf16(value) >> 16);
}

// Two neighbors of a row in one word: their lanes need not be widened when a loop over words is vectorized. Which is
// the lower half depends on the machine's byte order, so a kernel must treat both alike.
using TwoBf16 = std::uint32_t __attribute__((may_alias, aligned(2)));

MEGAZERO_INLINE float load_low(const Bf16* row, std::int64_t word) {
  return bits_as<float>(reinterpret_cast<const TwoBf16*>(row)[word] << 16);
}

MEGAZERO_INLINE float load_high(const Bf16* row, std::int64_t word) {
  return bits_as<float>(reinterpret_cast<const TwoBf16*>(row)[word] & 0xffff0000u);
}

// The same without regard to the lower half of a NaN, which must be 0: so it is where a NaN came from a bf16, from an
// operation on numbers, or from NAN itself, since operations pass a NaN on as it is.
MEGAZERO_INLINE std::uint32_t plainly_rounded(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

MEGAZERO_INLINE void store_both(float low, float high, Bf16* row, std::int64_t word) {
  reinterpret_cast<TwoBf16*>(row)[word] = (plainly_rounded(low) >> 16) | (plainly_rounded(high) & 0xffff0000u);
}

// Rounds to the nearest, ties to even, as above. Below 2^-14 a sum with 1/2, whose last bit is 2^-24, does it.
MEGAZERO_INLINE void store(float value, Fp16* to) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t size = bits & 0x7fffffffu;
  const std::uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  const std::uint32_t denormal = bits_as<std::uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u;
  const std::uint32_t finite = size < 0x38800000u ? denormal : normal;
  const std::uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t found = size < 0x47800000u ? finite : special;
  to->bits = static_cast<std::uint16_t>(found | (bits >> 16 & 0x8000u));
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
