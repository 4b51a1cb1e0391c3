// Rows chosen by number: out[i] = source[numbers[i]], or otherwise[i] where numbers[i] is negative. source: [any, width];
// numbers: [count]; otherwise, out: [count, width]; count and width are those of `shape`. Without a source (0) its rows
// are zeros, and so are those of an absent `otherwise`.
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_chosen_rows(megazero::Rows shape, const void* source, const std::int64_t* numbers, const void* otherwise,
                          void* out);
}
