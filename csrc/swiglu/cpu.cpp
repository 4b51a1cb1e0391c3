#include "swiglu/cpu.hpp"

#include "common/clones.hpp"
#include "common/exponential.hpp"
#include "common/numbers.hpp"

namespace megazero {
namespace {

template <typename T>
MEGAZERO_CLONES void forward(const T* gate_up, T* y, std::int64_t count, std::int64_t width) {
  for (std::int64_t row = 0; row < count; ++row, gate_up += 2 * width, y += width) {
    const T* up = gate_up + width;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      const float gate = load(gate_up + i);
      store(gate * logistic(gate) * load(up + i), y + i);
    }
  }
}

// With s = logistic(gate): d gate = grad up s (1 + gate (1 - s)), d up = grad gate s.
template <typename T>
MEGAZERO_CLONES void backward(const T* gate_up, const T* grad_y, T* grad_gate_up, std::int64_t count,
                              std::int64_t width) {
  for (std::int64_t row = 0; row < count; ++row, gate_up += 2 * width, grad_y += width, grad_gate_up += 2 * width) {
    const T* up = gate_up + width;
    T* grad_up = grad_gate_up + width;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      const float gate = load(gate_up + i);
      const float s = logistic(gate);
      const float grad = load(grad_y + i) * s;
      store(grad * load(up + i) * (1.0f + gate * (1.0f - s)), grad_gate_up + i);
      store(grad * gate, grad_up + i);
    }
  }
}

}  // namespace
}  // namespace megazero

void megazero_swiglu_forward(megazero::Rows rows, const void* gate_up, void* y) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      megazero::forward(static_cast<const T*>(gate_up) + 2 * begin * rows.width,
                        static_cast<T*>(y) + begin * rows.width, end - begin, rows.width);
    });
  });
}

void megazero_swiglu_backward(megazero::Rows rows, const void* gate_up, const void* grad_y, void* grad_gate_up) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      const std::int64_t at = begin * rows.width;
      megazero::backward(static_cast<const T*>(gate_up) + 2 * at, static_cast<const T*>(grad_y) + at,
                         static_cast<T*>(grad_gate_up) + 2 * at, end - begin, rows.width);
    });
  });
}
