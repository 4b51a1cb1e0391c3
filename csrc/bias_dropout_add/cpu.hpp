// residual + dropout(x + bias), and its gradients; the mask is made again in backward.
#pragma once

#include "common/keep.hpp"
#include "common/parallel.hpp"

extern "C" {
// out = residual + keep * (x + bias), all [count, width] but bias [width], fp32, which is 0 for none.
void megazero_bias_dropout_add_forward(megazero::Rows rows, megazero::Keep keep, const void* x, const float* bias,
                                       const void* residual, void* out);

// grad_x = keep * grad, and grad_bias [width] its sum over rows, unless that is 0.
void megazero_bias_dropout_add_backward(megazero::Rows rows, megazero::Keep keep, const void* grad, void* grad_x,
                                        float* grad_bias);
}
