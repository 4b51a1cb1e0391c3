// Products of rows with a weight of integer codes of 8 or 4 bits, which stay codes in memory.
#pragma once

#include <cstdint>

#include "common/targets.hpp"

namespace megazero {

// How a product is computed, beyond what the processor has.
enum class CodedPath { baseline, avx2, avx512, avx512_vnni };  // in rising order

// The most that this processor has.
inline CodedPath coded_path() {
  const InstructionSet set = instruction_set();
#if MEGAZERO_HAS_TARGETS
  if (set == InstructionSet::avx512 && __builtin_cpu_supports("avx512vnni")) return CodedPath::avx512_vnni;
#endif
  return set == InstructionSet::avx512 ? CodedPath::avx512
         : set == InstructionSet::avx2 ? CodedPath::avx2
                                       : CodedPath::baseline;
}

}  // namespace megazero

// Codes are in panels of 16 outputs, the last one filled up with zeros: 32-bit words [panels, depth bits / 32, 16] of
// neighbours of a row of the weight, the first lowest. Scales are [panels, groups, 16].
extern "C" {
// y [rows, width] = x [rows, depth] times a weight, plus bias [width] if it is not 0; all fp32 and contiguous. The
// weight is code times scale, rounded to fp32; every sum is in order of depth, as in megazero_ordered_linear. `bits` is
// 8 or 4; `group` neighbours share a scale, and 32 / bits divides it as it divides depth. `most` is the most that is
// used of the processor.
void megazero_coded_linear(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t group,
                           std::int64_t bits, std::int64_t threads, const float* x, const std::int32_t* codes,
                           const float* scales, const float* bias, float* y, megazero::CodedPath most);

// The same with codes of 8 bits, one scale for a row of the weight, and rows of x rounded to 8 bits each: with
// s = greatest / 127.5, or 1 if that is 0, to x / s rounded to even and cut to [-128, 127]. Sums are exact integers.
// `greatest` [rows] is the largest magnitude of each row, or 0 if it is that of x; a row where it is not finite becomes
// NaN. 4 divides depth, which is at most 65,536.
void megazero_integer_linear(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t threads,
                             const float* x, const float* greatest, const std::int32_t* codes, const float* scales,
                             const float* bias, float* y, megazero::CodedPath most);
}
