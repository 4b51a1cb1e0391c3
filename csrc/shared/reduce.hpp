// Reduction of several arrays of one element type, element by element, in the order given.
#pragma once

#include <cstdint>
#include <string>

namespace megazero::shared {

enum class Reduction { sum, max, min };

// out[i] = sources[0][i] + sources[1][i] + ...; sums of bf16 and fp16 are in fp32 and rounded once, a sum of bool is
// "or", and max and min of a NaN are NaN. `out` may be one of the sources.
using Reducer = void (*)(const void* const* sources, int sources_count, void* out, std::int64_t elements);

struct Element {
  std::int64_t bytes;
  Reducer reducer;
};

// By torch's names of dtypes ("float32", ...) and of reductions. Throws std::invalid_argument for another.
Element element_of(const std::string& dtype, const std::string& reduction);

}  // namespace megazero::shared
