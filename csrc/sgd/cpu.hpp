// SGD in one pass, with weight decay as a part of the gradient g: u = momentum u + g, p = p - lr u.
#pragma once

#include "common/update.hpp"

extern "C" {
// Without momentum, u is null.
void megazero_sgd_step(megazero::UpdatePass pass, float* p, float* u, double lr, double momentum, double decay);
}
