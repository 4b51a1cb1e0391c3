// The tanh form of GELU of x + bias (Hendrycks & Gimpel 2016). bias: fp32 [width], or null.
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_bias_gelu_forward(megazero::Rows rows, const void* x, const float* bias, void* y);
void megazero_bias_gelu_backward(megazero::Rows rows, const void* x, const float* bias, const void* grad_y,
                                 void* grad_x);
}
