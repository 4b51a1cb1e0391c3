// Weighted sums of rows gathered by number: out[i] = sum over j of weights[i, j] rows[slots[i, j]], in order of j, with
// nothing for a slot outside of [0, available). rows: [available, width]; slots, weights: [count, each]; out:
// [count, width], of which count and width are those of `shape`. Without weights (0), each is 1.
//
// Backward: choice [available] is the place of each row in the flattened slots, or negative; no two slots are the same.
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_gathered_sum_forward(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* rows,
                                   const std::int64_t* slots, const float* weights, void* out);
void megazero_gathered_sum_backward(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* rows,
                                    const std::int64_t* slots, const std::int64_t* choice, const float* weights,
                                    const void* grad, void* grad_rows, float* grad_weights);
}
