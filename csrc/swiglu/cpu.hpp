// SwiGLU, silu(gate) * up (Shazeer 2020). gate_up: [count, 2, width], gate first; y: [count, width].
#pragma once

#include "common/parallel.hpp"

extern "C" {
void megazero_swiglu_forward(megazero::Rows rows, const void* gate_up, void* y);
void megazero_swiglu_backward(megazero::Rows rows, const void* gate_up, const void* grad_y, void* grad_gate_up);
}
