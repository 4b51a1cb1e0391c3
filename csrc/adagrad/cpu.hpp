// Adagrad (Duchi et al. 2011) in one pass, with weight decay as a part of the gradient g:
// sum = sum + g^2, p = p - lr g / (sqrt(sum) + eps).
#pragma once

#include "common/update.hpp"

extern "C" {
void megazero_adagrad_step(megazero::UpdatePass pass, float* p, float* sum, double lr, double eps, double decay);
}
