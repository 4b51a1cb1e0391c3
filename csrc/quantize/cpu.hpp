// Blockwise symmetric quantization for communication: `rows.count` rows of `rows.width` elements become as many packed
// rows, each of ceil(width / block) fp32 scales and then the codes, filled up with zeros to a multiple of 4 bytes.
// Formats: 0 is int8, 1 is int4 (the even element is the low half of its byte), 2 is fp8 e4m3.
#pragma once

#include <cstdint>

#include "common/parallel.hpp"

extern "C" {
// Rounds to nearest, ties to even; or stochastically, with the random bits of the stream that starts at `start` (a key
// mixed by SplitMix64) for element `first` and those after it. A block that is not finite gets NaN as its scale.
void megazero_quantize_rows(megazero::Rows rows, const void* x, std::uint8_t* packed, std::int64_t format,
                            std::int64_t block, bool stochastic, std::int64_t start, std::int64_t first);
void megazero_dequantize_rows(megazero::Rows rows, const std::uint8_t* packed, void* x, std::int64_t format,
                              std::int64_t block);
}
