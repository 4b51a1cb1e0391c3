#include "layer_norm/cpu.hpp"

#include <cmath>

#include "common/clones.hpp"
#include "common/numbers.hpp"
#include "common/thread_rows.hpp"

namespace megazero {
namespace {

// The statistics take two passes: the mean square minus the squared mean would cancel. A row stays in the first-level
// cache.
template <typename T>
MEGAZERO_CLONES void forward(const T* x, const float* weight, const float* bias, float eps, T* y, float* mean,
                             float* scale, std::int64_t count, std::int64_t width) {
  for (std::int64_t row = 0; row < count; ++row, x += width, y += width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < width; ++i) sum += load(x + i);
    const float middle = sum / static_cast<float>(width);
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < width; ++i) squares += (load(x + i) - middle) * (load(x + i) - middle);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      store((load(x + i) - middle) * factor * weight[i] + bias[i], y + i);
    }
    mean[row] = middle;
    scale[row] = factor;
  }
}

// With n = (x - mean) scale and g = grad_y weight: grad_x = scale (g - mean(g) - n mean(g n)); the parameters'
// gradients are the sums of grad_y n and grad_y over rows, added to here. g is kept in `weighted` [width]: if it were
// computed again, it would be fused into the subtraction, unrounded, and would not cancel against its own mean when all
// g are equal.
template <typename T>
MEGAZERO_CLONES void backward(const T* x, const float* weight, const float* mean, const float* scale, const T* grad_y,
                              T* grad_x, float* grad_weight, float* grad_bias, float* weighted,
                              std::int64_t count, std::int64_t width) {
  for (std::int64_t row = 0; row < count; ++row, x += width, grad_y += width, grad_x += width) {
    const float middle = mean[row];
    const float factor = scale[row];
    float sum = 0.0f;
    float product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
    for (std::int64_t i = 0; i < width; ++i) {
      const float grad = load(grad_y + i);
      const float normed = (load(x + i) - middle) * factor;
      grad_weight[i] += grad * normed;
      grad_bias[i] += grad;
      weighted[i] = grad * weight[i];
      sum += weighted[i];
      product += weighted[i] * normed;
    }
    const float mean_grad = sum / static_cast<float>(width);
    const float mean_product = product / static_cast<float>(width);
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      const float normed = (load(x + i) - middle) * factor;
      store(factor * (weighted[i] - mean_grad - normed * mean_product), grad_x + i);
    }
  }
}

}  // namespace
}  // namespace megazero

void megazero_layer_norm_forward(megazero::Rows rows, const void* x, const float* weight, const float* bias, float eps,
                                 void* y, float* mean, float* scale) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      const std::int64_t at = begin * rows.width;
      megazero::forward(static_cast<const T*>(x) + at, weight, bias, eps, static_cast<T*>(y) + at, mean + begin,
                        scale + begin, end - begin, rows.width);
    });
  });
}

void megazero_layer_norm_backward(megazero::Rows rows, const void* x, const float* weight, const float* mean,
                                  const float* scale, const void* grad_y, void* grad_x, float* grad_weight,
                                  float* grad_bias) {
  const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
  megazero::ThreadRows weight_sums(workers, rows.width);
  megazero::ThreadRows bias_sums(workers, rows.width);
  megazero::ThreadRows weighted(workers, rows.width);
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t worker) {
      const std::int64_t at = begin * rows.width;
      megazero::backward(static_cast<const T*>(x) + at, weight, mean + begin, scale + begin,
                         static_cast<const T*>(grad_y) + at, static_cast<T*>(grad_x) + at, weight_sums.of(worker),
                         bias_sums.of(worker), weighted.of(worker), end - begin, rows.width);
    });
  });
  weight_sums.write_sum(grad_weight);
  bias_sums.write_sum(grad_bias);
}
