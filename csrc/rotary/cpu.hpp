// Rotary position embedding in the halves convention: channel i of the first `half` pairs with channel i + half.
#pragma once

#include "common/head_tensor.hpp"
#include "common/parallel.hpp"

extern "C" {
// out = x turned by `direction` (1 or -1) times the angles whose cosines and sines, fp32, are `half` adjacent numbers
// for (row, sample), which are table_row and table_sample apart. `rows` has x's rows times its samples, and heads times
// size elements for each; channels from 2 half on are copied.
void megazero_rotary(megazero::Rows rows, std::int64_t samples, std::int64_t heads, std::int64_t half,
                     megazero::HeadTensor x, const float* cosines, const float* sines, std::int64_t table_row,
                     std::int64_t table_sample, float direction, megazero::HeadTensor out);
}
