// A step of one of the optimizers of rules.hpp, in one pass over memory.
#pragma once

#include "common/update.hpp"

extern "C" {
// The address of each kind of states is in `states`. Returns false, and does nothing, if no rule has that name, as many
// kinds and as many coefficients.
bool megazero_update(const char* rule, megazero::UpdatePass pass, float* p, std::int64_t kinds, float* const* states,
                     std::int64_t count, const double* coefficients);
}
