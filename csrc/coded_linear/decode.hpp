// Codes in memory as vectors of floats, for each instruction set.
#pragma once

#include <cstdint>

#include "common/product.hpp"

namespace megazero::coded {

// Vectors of as many floats as an instruction set has, and of the words that become them.
struct Lanes4 {
  using Floats = Floats4;
  using Words = std::int32_t __attribute__((vector_size(16), aligned(4), may_alias));
};
struct Lanes8 {
  using Floats = Floats8;
  using Words = std::int32_t __attribute__((vector_size(32), aligned(4), may_alias));
};
struct Lanes16 {
  using Floats = Floats16;
  using Words = std::int32_t __attribute__((vector_size(64), aligned(4), may_alias));
};

// A row of a panel: 16 words, each of the codes of a run of neighbours in the depth.
template <typename Lanes, int Bits>
struct Codes {
  using Floats = typename Lanes::Floats;
  using Vector = typename Floats::Vector;
  static constexpr int lanes = sizeof(Vector) / sizeof(float), vectors = kPanel / lanes, run = 32 / Bits;

  // weight = the codes at one place of the run (shifted up, which drops those above, then down, which spreads the
  // sign), times their scales.
  static MEGAZERO_INLINE void decode(const std::int32_t* words, const float* scales, int part, int place,
                                     Vector& weight) {
    const auto read = *reinterpret_cast<const typename Lanes::Words*>(words + part * lanes);
    weight = __builtin_convertvector(read << (32 - Bits * (place + 1)) >> (32 - Bits), Vector) *
             *reinterpret_cast<const Vector*>(scales + part * lanes);
  }

  // The scales by which codes are multiplied that stay uppermost in their words.
  static MEGAZERO_INLINE Vector uppermost(const float* scales, int part) {
    return *reinterpret_cast<const Vector*>(scales + part * lanes) * (1.0f / static_cast<float>(1u << (32 - Bits)));
  }

  // The same weight with one shift: the code is left uppermost, and what is below it masked.
  static MEGAZERO_INLINE void decode(const std::int32_t* words, Vector uppermost, int part, int place, Vector& weight) {
    constexpr auto mask = static_cast<std::int32_t>(~0u << (32 - Bits));
    const auto read = *reinterpret_cast<const typename Lanes::Words*>(words + part * lanes);
    weight = __builtin_convertvector(read << (32 - Bits * (place + 1)) & mask, Vector) * uppermost;
  }
};

}  // namespace megazero::coded
