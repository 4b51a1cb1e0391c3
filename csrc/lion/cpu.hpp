// Lion (Chen et al. 2023) in one pass: p = p decay - lr sign(beta1 m + (1 - beta1) g), m = beta2 m + (1 - beta2) g.
#pragma once

#include "common/update.hpp"

extern "C" {
void megazero_lion_step(megazero::UpdatePass pass, float* p, float* m, double beta1, double beta2, double lr,
                        double decay);
}
