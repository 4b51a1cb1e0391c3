// The parts of vocab-parallel cross-entropy that read the logits (Shoeybi et al. 2019; Milakov & Gimelshein 2018).
//
// In each row of `stride` logits the first `rows.width` count; the rest are padding. local: the target's column here,
// or -1 if another rank holds it. Everything else is fp32 [count].
#pragma once

#include "common/parallel.hpp"

extern "C" {
// Computes for each row the maximum (the lowest float for a row of -inf), the sum of exp(logit - maximum), and the
// target's logit or 0.
void megazero_cross_entropy_statistics(megazero::Rows rows, std::int64_t stride, const void* logits,
                                       const std::int64_t* local, float* maximum, float* total, float* picked);

// grad_logits [count, stride] = grad (exp(logit - normalizer) - [column is the target]), 0 in the padding. It may be the
// logits.
void megazero_cross_entropy_gradient(megazero::Rows rows, std::int64_t stride, const void* logits,
                                     const std::int64_t* local, const float* normalizer, const float* grad,
                                     void* grad_logits);
}
