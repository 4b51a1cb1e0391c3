// Exact sums of products of bytes: a few rows of codes times one panel, for each instruction set.
#pragma once

#include <cstdint>

#include "common/product.hpp"
#include "common/targets.hpp"

#if MEGAZERO_HAS_TARGETS
#include <immintrin.h>
#ifndef MEGAZERO_VNNI  // a test imitates these instructions
#define MEGAZERO_VNNI __attribute__((target("arch=x86-64-v4,avx512vnni")))
#endif
#endif

namespace megazero::coded {

// Each has `tile`, which writes sums [Rows, 16] of rows of codes [4 words], `row` apart, times a panel [words, 16, 4]:
// `Code` is how it takes them, and `offset` what it wants added.
struct PlainIntegers {
  using Code = std::int16_t;
  static constexpr int offset = 0, rows = 1;

  template <int Rows>
  static void tile(const Code* x, std::int64_t row, const std::int8_t* panel, std::int64_t words, std::int32_t* sums) {
    for (int i = 0; i < Rows; ++i, x += row, sums += kPanel) {
      for (int j = 0; j < kPanel; ++j) sums[j] = 0;
      for (std::int64_t k = 0; k < 4 * words; ++k) {
        for (int j = 0; j < kPanel; ++j) sums[j] += x[k] * panel[(k / 4 * kPanel + j) * 4 + k % 4];
      }
    }
  }
};

#if MEGAZERO_HAS_TARGETS
// Bytes are widened before they are multiplied: products of unsigned with signed bytes, added in pairs, would not fit
// the 16 bits that vpmaddubsw has for them, and be cut silently. Products of 16 bits have 32 for a pair.
struct Avx2Integers {
  using Code = std::int16_t;
  static constexpr int offset = 0, rows = 2;

  template <int Rows>
  MEGAZERO_AVX2 static void tile(const Code* x, std::int64_t row, const std::int8_t* panel, std::int64_t words,
                                 std::int32_t* sums) {
    __m256i total[Rows][4] = {};  // of four columns each, two sums for a column
    for (std::int64_t k = 0; k < words; ++k, panel += 4 * kPanel) {
      __m256i wide[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        wide[j] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel) + j));
      }
#pragma GCC unroll 2
      for (int i = 0; i < Rows; ++i) {
        const __m256i four = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x + i * row + 4 * k)));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          total[i][j] = _mm256_add_epi32(total[i][j], _mm256_madd_epi16(wide[j], four));
        }
      }
    }
    for (int i = 0; i < Rows; ++i) {
      for (int j = 0; j < 2; ++j) {
        // Sums of columns 0 1 4 5 | 2 3 6 7 of eight, put in order.
        const __m256i eight = _mm256_hadd_epi32(total[i][2 * j], total[i][2 * j + 1]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * kPanel) + j, _mm256_permute4x64_epi64(eight, 0xd8));
      }
    }
  }
};

// Unsigned with signed bytes, four products to 32 bits at once. Codes of x are 128 too large, so that they are
// unsigned, and what that adds is taken off.
struct VnniIntegers {
  using Code = std::uint8_t;
  static constexpr int offset = 128, rows = 4;

  template <int Rows>
  MEGAZERO_VNNI static void tile(const Code* x, std::int64_t row, const std::int8_t* panel, std::int64_t words,
                                 std::int32_t* sums) {
    const __m512i offsets = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i total[Rows] = {}, added = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < words; ++k, panel += 4 * kPanel) {
      const __m512i codes = _mm512_loadu_si512(panel);
      added = _mm512_dpbusd_epi32(added, offsets, codes);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) {
        std::int32_t four;
        __builtin_memcpy(&four, x + i * row + 4 * k, sizeof(four));
        total[i] = _mm512_dpbusd_epi32(total[i], _mm512_set1_epi32(four), codes);
      }
    }
    for (int i = 0; i < Rows; ++i) _mm512_storeu_si512(sums + i * kPanel, _mm512_sub_epi32(total[i], added));
  }
};
#else
using Avx2Integers = PlainIntegers;
using VnniIntegers = PlainIntegers;
#endif

}  // namespace megazero::coded
