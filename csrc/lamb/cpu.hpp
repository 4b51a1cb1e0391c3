// The two passes of LAMB (You et al. 2020) over one flat fp32 tensor: m and v are Adam's moments, and the update is
// u = factor m / (sqrt(v) + eps) + decay p.
#pragma once

#include "common/parallel.hpp"

extern "C" {
// Moves m and v by the gradient g, and writes the sums of squares of p and u to sums: [ceil(rows.count / block), 2].
void megazero_lamb_norms(megazero::Rows rows, const float* p, const float* g, float* m, float* v, double* sums,
                         std::int64_t block, double beta1, double beta2, double factor, double eps, double decay);
// p -= rate u.
void megazero_lamb_move(megazero::Rows rows, float* p, const float* m, const float* v, double rate, double factor,
                        double eps, double decay);
}
