#include "rms_norm/cpu.hpp"

#include <cmath>

#include "common/clones.hpp"
#include "common/numbers.hpp"
#include "common/thread_rows.hpp"

namespace megazero {
namespace {

template <typename T>
MEGAZERO_CLONES void forward(const T* x, const float* weight, float eps, T* y, float* scale, std::int64_t count,
                             std::int64_t width) {
  for (std::int64_t row = 0; row < count; ++row, x += width, y += width) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < width; ++i) squares += load(x + i) * load(x + i);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) store(load(x + i) * factor * weight[i], y + i);
    scale[row] = factor;
  }
}

// With n = x scale and g = grad_y weight: grad_x = scale (g - n mean(g n)); the weight's gradient is the sum of
// grad_y n over rows, added to here.
template <typename T>
MEGAZERO_CLONES void backward(const T* x, const float* weight, const float* scale, const T* grad_y, T* grad_x,
                              float* grad_weight, std::int64_t count, std::int64_t width) {
  for (std::int64_t row = 0; row < count; ++row, x += width, grad_y += width, grad_x += width) {
    const float factor = scale[row];
    float product = 0.0f;
#pragma omp simd reduction(+ : product)
    for (std::int64_t i = 0; i < width; ++i) {
      const float along = load(grad_y + i) * load(x + i) * factor;
      grad_weight[i] += along;
      product += along * weight[i];
    }
    const float mean_product = product / static_cast<float>(width);
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      store(factor * (load(grad_y + i) * weight[i] - load(x + i) * factor * mean_product), grad_x + i);
    }
  }
}

}  // namespace
}  // namespace megazero

void megazero_rms_norm_forward(megazero::Rows rows, const void* x, const float* weight, float eps, void* y,
                               float* scale) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      const std::int64_t at = begin * rows.width;
      megazero::forward(static_cast<const T*>(x) + at, weight, eps, static_cast<T*>(y) + at, scale + begin,
                        end - begin, rows.width);
    });
  });
}

void megazero_rms_norm_backward(megazero::Rows rows, const void* x, const float* weight, const float* scale,
                                const void* grad_y, void* grad_x, float* grad_weight) {
  const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
  megazero::ThreadRows sums(workers, rows.width);
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t worker) {
      const std::int64_t at = begin * rows.width;
      megazero::backward(static_cast<const T*>(x) + at, weight, scale + begin, static_cast<const T*>(grad_y) + at,
                         static_cast<T*>(grad_x) + at, sums.of(worker), end - begin, rows.width);
    });
  });
  sums.write_sum(grad_weight);
}
