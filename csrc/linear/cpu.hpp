// The product of rows with a weight, every sum in order of depth, so that a row's result has the same bits whatever
// other rows there are.
#pragma once

#include <cstdint>

#include "common/targets.hpp"

extern "C" {
// Packs a weight [width, depth], rows `row` apart, of bf16 if narrow, else fp32, into panels [width / 16, depth, 16] of
// fp32, the last padded with zeros.
void megazero_pack_weight(std::int64_t width, std::int64_t depth, std::int64_t row, bool narrow, const void* weight,
                          float* panels);

// y [rows, width] = x [rows, depth] times the packed weight, plus bias [width] if it is not 0; all fp32 and contiguous.
// `most` is the most that is used of the processor.
void megazero_ordered_linear(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t threads,
                             const float* x, const float* panels, const float* bias, float* y,
                             megazero::InstructionSet most);
}
