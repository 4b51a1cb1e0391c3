// Layer normalization of rows (Ba, Kiros & Hinton 2016). weight, bias and their gradients: fp32 [width]; mean and
// scale = 1 / sqrt(variance + eps): fp32 [count].
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_layer_norm_forward(megazero::Rows rows, const void* x, const float* weight, const float* bias, float eps,
                                 void* y, float* mean, float* scale);
void megazero_layer_norm_backward(megazero::Rows rows, const void* x, const float* weight, const float* mean,
                                  const float* scale, const void* grad_y, void* grad_x, float* grad_weight,
                                  float* grad_bias);
}
