// The rows that experts get of tokens (the permute of a mixture of experts): out[slots[i, j]] = x[i] for each slot in
// [0, available), zeros in the rows that no slot names. x: [count, width]; slots: [count, each], no two of them the
// same row; choice: [available], the place of each row in the flattened slots, or negative; 0 if every row has a slot.
// out: [available, width]. count and width are those of `shape`.
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_permute(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* x,
                      const std::int64_t* slots, const std::int64_t* choice, void* out);
}
