#include "cross_entropy/cpu.hpp"

#include <limits>

#include "common/clones.hpp"
#include "common/exponential.hpp"
#include "common/numbers.hpp"

namespace megazero {
namespace {

// A NaN is never the maximum, but it makes the sum NaN.
template <typename T>
MEGAZERO_CLONES void row_statistics(const T* logits, std::int64_t columns, float* maximum, float* total) {
  float highest = std::numeric_limits<float>::lowest();
#pragma omp simd reduction(max : highest)
  for (std::int64_t i = 0; i < columns; ++i) {
    const float logit = load(logits + i);
    highest = logit > highest ? logit : highest;
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += exponential_below(load(logits + i) - highest);
  *maximum = highest;
  *total = sum;
}

template <typename T>
MEGAZERO_CLONES void row_gradient(const T* logits, std::int64_t columns, float normalizer, float grad, T* out) {
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) store(exponential_below(load(logits + i) - normalizer) * grad, out + i);
}

template <typename T>
void set_target(float logit, float normalizer, float grad, T* out) {
  store((exponential_below(logit - normalizer) - 1.0f) * grad, out);
}

}  // namespace
}  // namespace megazero

void megazero_cross_entropy_statistics(megazero::Rows rows, std::int64_t stride, const void* logits,
                                       const std::int64_t* local, float* maximum, float* total, float* picked) {
  megazero::with_element(rows.narrow, [&](auto element) {
    const auto* first = static_cast<const decltype(element)*>(logits);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      for (std::int64_t row = begin; row < end; ++row) {
        const auto* of_row = first + row * stride;
        megazero::row_statistics(of_row, rows.width, maximum + row, total + row);
        picked[row] = local[row] < 0 ? 0.0f : megazero::load(of_row + local[row]);
      }
    });
  });
}

void megazero_cross_entropy_gradient(megazero::Rows rows, std::int64_t stride, const void* logits,
                                     const std::int64_t* local, const float* normalizer, const float* grad,
                                     void* grad_logits) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, stride, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* of_row = static_cast<const T*>(logits) + row * stride;
        T* out = static_cast<T*>(grad_logits) + row * stride;
        const float target = local[row] < 0 ? 0.0f : megazero::load(of_row + local[row]);  // out may be of_row
        megazero::row_gradient(of_row, rows.width, normalizer[row], grad[row], out);
        if (local[row] >= 0) megazero::set_target(target, normalizer[row], grad[row], out + local[row]);
        std::fill(out + rows.width, out + stride, T{});
      }
    });
  });
}
