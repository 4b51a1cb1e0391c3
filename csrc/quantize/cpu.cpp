#include "quantize/cpu.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/clones.hpp"
#include "common/numbers.hpp"

namespace megazero {
namespace {

constexpr std::int64_t kInt8 = 0;
constexpr std::int64_t kInt4 = 1;
constexpr std::int64_t kPiece = 256;  // elements whose quotients are kept between two loops; even
constexpr float kSmallestScale = 0x1p-126f;
constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr std::uint64_t kGoldenGamma = 0x9e3779b97f4a7c15u;

// Where things are in a packed row.
struct PackedRow {
  PackedRow(std::int64_t width, std::int64_t block, std::int64_t format)
      : blocks((width + block - 1) / block),
        code_bytes(format == kInt4 ? (width + 1) / 2 : width),
        bytes(4 * blocks + (code_bytes + 3) / 4 * 4) {}

  std::int64_t blocks;
  std::int64_t code_bytes;
  std::int64_t bytes;
};

float largest_of(std::int64_t format) { return format == kInt8 ? 127.0f : format == kInt4 ? 7.0f : 448.0f; }

// Which blocks of all rows a worker has: blocks, not rows, are divided, for there may be one row.
struct BlockPlace {
  BlockPlace(std::int64_t number, const PackedRow& layout, std::int64_t width, std::int64_t block)
      : row(number / layout.blocks), in_row(number % layout.blocks), at(in_row * block) {
    count = std::min(block, width - at);
  }

  std::int64_t row;
  std::int64_t in_row;
  std::int64_t at;
  std::int64_t count;
};

// The bits of the largest magnitude. As integers magnitudes are in the same order, infinity and NaN last.
template <typename T>
MEGAZERO_CLONES std::uint32_t largest_bits(const T* x, std::int64_t count) {
  std::int32_t found = 0;
#pragma omp simd reduction(max : found)
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::int32_t>(bits_as<std::uint32_t>(load(x + i)) & 0x7fffffffu);
    found = bits > found ? bits : found;
  }
  return static_cast<std::uint32_t>(found);
}

template <typename T>
MEGAZERO_CLONES void divide(const T* x, float* quotients, std::int64_t count, float scale) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    quotients[i] = load(x + i) / scale;
  }
}

// The top 24 bits of a SplitMix64 stream's number at `index`, as a fraction.
MEGAZERO_INLINE float uniform(std::uint64_t start, std::uint64_t index) {
  std::uint64_t z = start + (index + 1) * kGoldenGamma;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<float>(static_cast<std::int32_t>(z >> 40)) * 0x1p-24f;
}

// The distance between neighbouring fp8 numbers around x: 2^(exponent - 3), at least 2^-9.
MEGAZERO_INLINE float fp8_unit(float x) {
  const auto exponent = static_cast<std::int32_t>((bits_as<std::uint32_t>(x) >> 23) & 255u);
  return bits_as<float>(static_cast<std::uint32_t>((exponent < 121 ? 121 : exponent) - 3) << 23);
}

// One code unit up or down, up with a probability that is the distance from below.
MEGAZERO_INLINE float rounded_by_chance(float x, float unit, float chance) {
  const float whole = x / unit;  // a power of two: exact
  const float towards_zero = static_cast<float>(static_cast<std::int32_t>(whole));
  const float below = towards_zero - (towards_zero > whole ? 1.0f : 0.0f);
  return (below + (chance < whole - below ? 1.0f : 0.0f)) * unit;
}

MEGAZERO_CLONES void round_integers_by_chance(float* x, std::int64_t count, std::uint64_t start,
                                              std::uint64_t first) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = rounded_by_chance(x[i], 1.0f, uniform(start, first + static_cast<std::uint64_t>(i)));
  }
}

MEGAZERO_CLONES void round_fp8_by_chance(float* x, std::int64_t count, std::uint64_t start, std::uint64_t first) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = rounded_by_chance(x[i], fp8_unit(x[i]), uniform(start, first + static_cast<std::uint64_t>(i)));
  }
}

// To the nearest integer, ties to even, within `largest`: adding 1.5 * 2^23 leaves no room for a fraction.
MEGAZERO_INLINE std::int32_t integer_code(float x, float largest) {
  const float within = x > largest ? largest : (x < -largest ? -largest : x);
  return static_cast<std::int32_t>(bits_as<std::uint32_t>(within + 0x1.8p23f) - bits_as<std::uint32_t>(0x1.8p23f));
}

// To the nearest fp8, ties to even. Below 2^-6 codes are multiples of 2^-9, as are floats next to 2^14; above, the
// significand loses 20 bits.
MEGAZERO_INLINE std::uint8_t fp8_code(float x) {
  const std::uint32_t bits = bits_as<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const float absolute = bits_as<float>(magnitude);
  const float within = absolute > 448.0f ? 448.0f : absolute;
  const std::uint32_t kept = bits_as<std::uint32_t>(within);
  const std::uint32_t small = bits_as<std::uint32_t>(within + 0x1p14f) - bits_as<std::uint32_t>(0x1p14f);
  const std::uint32_t normal = ((kept + 0x7ffffu + ((kept >> 20) & 1u)) >> 20) - (120u << 3);
  return static_cast<std::uint8_t>((within < 0x1p-6f ? small : normal) | ((bits >> 24) & 0x80u));
}

MEGAZERO_INLINE float fp8_value(std::uint8_t code) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(code & 0x7fu);
  // The exponent's offset is 7 here and 127 there. NaN is no code of ours.
  const float value = bits_as<float>(magnitude << 20) * 0x1p120f;
  return bits_as<float>(bits_as<std::uint32_t>(value) | (static_cast<std::uint32_t>(code & 0x80u) << 24));
}

MEGAZERO_CLONES void write_int8(const float* quotients, std::uint8_t* codes, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<std::uint8_t>(integer_code(quotients[i], 127.0f));
  }
}

MEGAZERO_CLONES void write_int4(const float* quotients, std::uint8_t* codes, std::int64_t pairs) {
#pragma omp simd
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int32_t low = integer_code(quotients[2 * i], 7.0f) & 15;
    const std::int32_t high = integer_code(quotients[2 * i + 1], 7.0f) & 15;
    codes[i] = static_cast<std::uint8_t>(low | (high << 4));
  }
}

MEGAZERO_CLONES void write_fp8(const float* quotients, std::uint8_t* codes, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = fp8_code(quotients[i]);
  }
}

template <typename T>
void quantize_block(const T* x, std::int64_t count, std::uint8_t* scale_at, std::uint8_t* codes, std::int64_t format,
                    bool stochastic, std::uint64_t start, std::uint64_t first) {
  const std::uint32_t bits = largest_bits(x, count);
  const bool finite = bits < 0x7f800000u;
  const float scale = finite ? std::max(bits_as<float>(bits) / largest_of(format), kSmallestScale)
                             : std::numeric_limits<float>::quiet_NaN();
  std::memcpy(scale_at, &scale, sizeof(float));
  if (!finite) {
    std::memset(codes, 0, static_cast<std::size_t>(format == kInt4 ? (count + 1) / 2 : count));
    return;
  }
  float quotients[kPiece];
  for (std::int64_t at = 0; at < count; at += kPiece) {
    const std::int64_t size = std::min(kPiece, count - at);
    divide(x + at, quotients, size, scale);
    const std::uint64_t number = first + static_cast<std::uint64_t>(at);
    if (stochastic && format <= kInt4) {
      round_integers_by_chance(quotients, size, start, number);
    } else if (stochastic) {
      round_fp8_by_chance(quotients, size, start, number);
    }
    if (format == kInt8) {
      write_int8(quotients, codes + at, size);
    } else if (format == kInt4) {
      if (size % 2) {
        quotients[size] = 0.0f;  // kPiece is even
      }
      write_int4(quotients, codes + at / 2, (size + 1) / 2);
    } else {
      write_fp8(quotients, codes + at, size);
    }
  }
}

// A product of finite numbers does not become infinite by rounding; a NaN stays one.
MEGAZERO_INLINE float bounded(float x) {
  return x > kLargestFloat ? kLargestFloat : (x < -kLargestFloat ? -kLargestFloat : x);
}

template <typename T>
MEGAZERO_CLONES void read_int8(const std::uint8_t* codes, T* x, std::int64_t count, float scale) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    store(bounded(static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale), x + i);
  }
}

template <typename T>
MEGAZERO_CLONES void read_int4(const std::uint8_t* codes, T* x, std::int64_t count, float scale) {
#pragma omp simd
  for (std::int64_t i = 0; i < count / 2; ++i) {
    const std::int32_t low = ((codes[i] & 15) ^ 8) - 8;
    const std::int32_t high = ((codes[i] >> 4) ^ 8) - 8;
    store(bounded(static_cast<float>(low) * scale), x + 2 * i);
    store(bounded(static_cast<float>(high) * scale), x + 2 * i + 1);
  }
  if (count % 2) {
    const std::int32_t low = ((codes[count / 2] & 15) ^ 8) - 8;
    store(bounded(static_cast<float>(low) * scale), x + count - 1);
  }
}

template <typename T>
MEGAZERO_CLONES void read_fp8(const std::uint8_t* codes, T* x, std::int64_t count, float scale) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    store(bounded(fp8_value(codes[i]) * scale), x + i);
  }
}

template <typename T>
void dequantize_block(const std::uint8_t* scale_at, const std::uint8_t* codes, T* x, std::int64_t count,
                      std::int64_t format) {
  float scale;
  std::memcpy(&scale, scale_at, sizeof(float));
  if (format == kInt8) {
    read_int8(codes, x, count, scale);
  } else if (format == kInt4) {
    read_int4(codes, x, count, scale);
  } else {
    read_fp8(codes, x, count, scale);
  }
}

}  // namespace
}  // namespace megazero

void megazero_quantize_rows(megazero::Rows rows, const void* x, std::uint8_t* packed, std::int64_t format,
                            std::int64_t block, bool stochastic, std::int64_t start, std::int64_t first) {
  using namespace megazero;
  const PackedRow layout(rows.width, block, format);
  const std::int64_t blocks = rows.count * layout.blocks;
  for (std::int64_t row = 0; row < rows.count; ++row) {
    const std::int64_t used = 4 * layout.blocks + layout.code_bytes;
    std::memset(packed + row * layout.bytes + used, 0, static_cast<std::size_t>(layout.bytes - used));
  }
  with_element(rows.narrow, [&](auto element) {
    using Element = decltype(element);
    const auto* from = static_cast<const Element*>(x);
    parallel_for(blocks, workers_for(blocks, block, rows.threads), [&](std::int64_t begin, std::int64_t end,
                                                                       std::int64_t) {
      for (std::int64_t number = begin; number < end; ++number) {
        const BlockPlace place(number, layout, rows.width, block);
        const std::int64_t at = place.row * rows.width + place.at;
        std::uint8_t* row = packed + place.row * layout.bytes;
        quantize_block(from + at, place.count, row + 4 * place.in_row,
                       row + 4 * layout.blocks + (format == kInt4 ? place.at / 2 : place.at), format, stochastic,
                       static_cast<std::uint64_t>(start), static_cast<std::uint64_t>(first + at));
      }
    });
  });
}

void megazero_dequantize_rows(megazero::Rows rows, const std::uint8_t* packed, void* x, std::int64_t format,
                              std::int64_t block) {
  using namespace megazero;
  const PackedRow layout(rows.width, block, format);
  const std::int64_t blocks = rows.count * layout.blocks;
  with_element(rows.narrow, [&](auto element) {
    using Element = decltype(element);
    auto* to = static_cast<Element*>(x);
    parallel_for(blocks, workers_for(blocks, block, rows.threads), [&](std::int64_t begin, std::int64_t end,
                                                                       std::int64_t) {
      for (std::int64_t number = begin; number < end; ++number) {
        const BlockPlace place(number, layout, rows.width, block);
        const std::uint8_t* row = packed + place.row * layout.bytes;
        dequantize_block(row + 4 * place.in_row,
                         row + 4 * layout.blocks + (format == kInt4 ? place.at / 2 : place.at),
                         to + place.row * rows.width + place.at, place.count, format);
      }
    });
  });
}
