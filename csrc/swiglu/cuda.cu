// SwiGLU, y = gate * sigmoid(gate) * up (Shazeer 2020), for gate_up [count, 2, width] and y [count, width].
#include "common/cuda_columns.hpp"

namespace megazero {

__device__ __forceinline__ float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int N>
__global__ void __launch_bounds__(128)
    swiglu_forward(std::int64_t count, std::int64_t width, Global<const T> gate_up, Global<T> y) {
  const std::int64_t first = first_column<N>();
  if (first >= width) return;
  Columns<N, true> gate, up;
#pragma unroll 1
  for (std::int64_t row = own_row(); row < count; row += rows_at_once()) {
    gate.load(gate_up + 2 * row * width, width, first);
    up.load(gate_up + (2 * row + 1) * width, width, first);
    gate.each([&](int n) { up.value[n] *= gate.value[n] * logistic(gate.value[n]); });
    up.store(y + row * width, width, first);
  }
}

// With s = sigmoid(gate): grad_gate = grad_y up s (1 + gate (1 - s)), grad_up = grad_y gate s.
template <typename T, int N>
__global__ void __launch_bounds__(128)
    swiglu_backward(std::int64_t count, std::int64_t width, Global<const T> gate_up, Global<const T> grad_y,
                    Global<T> grad_gate_up) {
  const std::int64_t first = first_column<N>();
  if (first >= width) return;
  Columns<N, true> gate, up, grad;
#pragma unroll 1
  for (std::int64_t row = own_row(); row < count; row += rows_at_once()) {
    gate.load(gate_up + 2 * row * width, width, first);
    up.load(gate_up + (2 * row + 1) * width, width, first);
    grad.load(grad_y + row * width, width, first);
    gate.each([&](int n) {
      const float s = logistic(gate.value[n]), open = grad.value[n] * s;
      grad.value[n] = open * gate.value[n];
      gate.value[n] = open * up.value[n] * (1.0f + gate.value[n] * (1.0f - s));
    });
    gate.store(grad_gate_up + 2 * row * width, width, first);
    grad.store(grad_gate_up + (2 * row + 1) * width, width, first);
  }
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_swiglu_forward(std::int64_t dtype, std::int64_t count, std::int64_t width,
                                            const void* gate_up, void* y, void* stream) {
  if (count == 0 || width == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      const ColumnLaunch launch = column_launch(count, width, pack());
      return MEGAZERO_LAUNCH((swiglu_forward<T, pack()>), launch.blocks, launch.threads, 0, stream, count, width,
                             static_cast<const T*>(gate_up), static_cast<T*>(y));
    };
    return with_columns<T>(false, width, start, gate_up, y);
  });
}
MEGAZERO_EXPORT(swiglu_forward)

extern "C" int megazero_cuda_swiglu_backward(std::int64_t dtype, std::int64_t count, std::int64_t width,
                                             const void* gate_up, const void* grad_y, void* grad_gate_up,
                                             void* stream) {
  if (count == 0 || width == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      const ColumnLaunch launch = column_launch(count, width, pack());
      return MEGAZERO_LAUNCH((swiglu_backward<T, pack()>), launch.blocks, launch.threads, 0, stream, count, width,
                             static_cast<const T*>(gate_up), static_cast<const T*>(grad_y),
                             static_cast<T*>(grad_gate_up));
    };
    return with_columns<T>(false, width, start, gate_up, grad_y, grad_gate_up);
  });
}
MEGAZERO_EXPORT(swiglu_backward)
