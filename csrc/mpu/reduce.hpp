// Elementwise reduction of several arrays of one element type, in the order given.
#pragma once

#include <cstdint>
#include <string>

namespace megazero::mpu {

enum class Reduction { sum, max, min };

// out[i] = sources[0][i] + sources[1][i] + ...; sums of bf16 and fp16 are taken in fp32 and rounded once, a sum of bool
// is "or", and max and min involving a NaN are NaN. `out` may be one of the sources.
using Reducer = void (*)(const void* const* sources, int sources_count, void* out, std::int64_t elements);

struct Element {
  std::int64_t bytes;
  Reducer reducer;
};

// Takes torch's names of dtypes ("float32", ...) and reductions. Throws std::invalid_argument for any other name.
Element element_of(const std::string& dtype, const std::string& reduction);

}  // namespace megazero::mpu
