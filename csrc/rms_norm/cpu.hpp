// Root-mean-square normalization of rows (Zhang & Sennrich 2019). weight and its gradient: fp32 [width];
// scale = 1 / sqrt(mean(x^2) + eps): fp32 [count].
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_rms_norm_forward(megazero::Rows rows, const void* x, const float* weight, float eps, void* y,
                               float* scale);
void megazero_rms_norm_backward(megazero::Rows rows, const void* x, const float* weight, const float* scale,
                                const void* grad_y, void* grad_x, float* grad_weight);
}
