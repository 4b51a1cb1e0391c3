// Squared ReLU, y = max(x, 0)^2 (So et al. 2021), of `count` elements; NaN stays NaN.
#include "common/cuda_columns.hpp"

namespace megazero {

__device__ __forceinline__ float positive_part(float x) { return x < 0.0f ? 0.0f : x; }

template <typename T, int N>
__global__ void __launch_bounds__(128) squared_relu_forward(std::int64_t count, Global<const T> x, Global<T> y) {
  const std::int64_t first = first_column<N>();
  if (first >= count) return;
  Columns<N> z;
  z.load(x, count, first);
  z.each([&](int n) { z.value[n] = positive_part(z.value[n]) * positive_part(z.value[n]); });
  z.store(y, count, first);
}

// grad_x = 2 max(x, 0) grad_y.
template <typename T, int N>
__global__ void __launch_bounds__(128)
    squared_relu_backward(std::int64_t count, Global<const T> x, Global<const T> grad_y, Global<T> grad_x) {
  const std::int64_t first = first_column<N>();
  if (first >= count) return;
  Columns<N> z, grad;
  z.load(x, count, first);
  grad.load(grad_y, count, first);
  z.each([&](int n) { grad.value[n] = 2.0f * (grad.value[n] * positive_part(z.value[n])); });
  grad.store(grad_x, count, first);
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_squared_relu_forward(std::int64_t dtype, std::int64_t count, const void* x, void* y,
                                                  void* stream) {
  if (count == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      const ColumnLaunch launch = column_launch(1, count, pack());
      return MEGAZERO_LAUNCH((squared_relu_forward<T, pack()>), launch.blocks, launch.threads, 0, stream, count,
                             static_cast<const T*>(x), static_cast<T*>(y));
    };
    return with_columns<T>(true, count, start, x, y);
  });
}
MEGAZERO_EXPORT(squared_relu_forward)

extern "C" int megazero_cuda_squared_relu_backward(std::int64_t dtype, std::int64_t count, const void* x,
                                                   const void* grad_y, void* grad_x, void* stream) {
  if (count == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      const ColumnLaunch launch = column_launch(1, count, pack());
      return MEGAZERO_LAUNCH((squared_relu_backward<T, pack()>), launch.blocks, launch.threads, 0, stream, count,
                             static_cast<const T*>(x), static_cast<const T*>(grad_y), static_cast<T*>(grad_x));
    };
    return with_columns<T>(true, count, start, x, grad_y, grad_x);
  });
}
MEGAZERO_EXPORT(squared_relu_backward)
