// Sums over columns: the second half of a weight's gradient, after each group of threads has added up its own rows.
#include "common/cuda_rows.hpp"

namespace megazero {

constexpr int kSummands = 8;

// A block of 32 x 8 threads takes 32 columns; each thread adds up every eighth row, then one adds the eight sums and
// rounds the total to P.
template <typename P>
__global__ void __launch_bounds__(256) column_sum(std::int64_t groups, std::int64_t width, Global<const float> partials,
                                                  Global<P> out) {
  MEGAZERO_SHARED(float, sums, kSummands * kWarp);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (column < width) {
    for (std::int64_t row = threadIdx.y; row < groups; row += kSummands) sum += partials[row * width + column];
  }
  sums[threadIdx.y * kWarp + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kSummands; ++i) total += sums[i * kWarp + threadIdx.x];
    out[column] = from_float<P>(total);
  }
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_column_sum(std::int64_t dtype, std::int64_t groups, std::int64_t width,
                                        const float* partials, void* out, void* stream) {
  if (width == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using P = decltype(element);
    return MEGAZERO_LAUNCH((column_sum<P>), ceil_div(width, kWarp), dim3(kWarp, kSummands), 0, stream, groups, width,
                           partials, static_cast<P*>(out));
  });
}
MEGAZERO_EXPORT(column_sum)

// How many groups of threads add up columns of `count` rows: the rows of the workspace that the caller provides.
extern "C" int megazero_cuda_column_groups(std::int64_t count, std::int64_t width) {
  return static_cast<int>(column_groups(count, width));
}
MEGAZERO_EXPORT(column_groups)
