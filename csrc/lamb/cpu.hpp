// The two passes of LAMB (You et al. 2020) over one flat fp32 tensor: m and v are Adam's moments, and the update is
// u = factor m / (sqrt(v) + eps) + decay p.
#pragma once

#include "common/update.hpp"

extern "C" {
// Moves m and v by the gradient, and writes the sums of squares of p and u to sums: [ceil(pass.count / block), 2].
// `block` is a multiple of kUpdateBlock; no weights are written.
void megazero_lamb_norms(megazero::UpdatePass pass, const float* p, float* m, float* v, double* sums,
                         std::int64_t block, double beta1, double beta2, double factor, double eps, double decay);
// p -= rate u; no gradients are read.
void megazero_lamb_move(megazero::UpdatePass pass, float* p, const float* m, const float* v, double rate,
                        double factor, double eps, double decay);
}
