// AdamW (Loshchilov & Hutter 2019) in one pass: m and v are the moments of the gradient, and
// p = p decay - rate m / (sqrt(v) + eps), with the corrections of both moments in rate and eps.
#pragma once

#include "common/update.hpp"

extern "C" {
void megazero_adam_step(megazero::UpdatePass pass, float* p, float* m, float* v, double beta1, double beta2,
                        double rate, double eps, double decay);
}
