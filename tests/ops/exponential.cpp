// exp alone, as kernels call it, for each instruction set that they are compiled for.
#include "common/exponential.hpp"

namespace megazero {

MEGAZERO_CLONES void exponentials(const float* x, float* y, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = exponential(x[i]);
}

}  // namespace megazero

extern "C" void exponentials(const float* x, float* y, std::int64_t count) { megazero::exponentials(x, y, count); }
