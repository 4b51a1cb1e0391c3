#include "gathered_sum/cpu.hpp"

#include <cmath>
#include <type_traits>

#include "common/clones.hpp"
#include "common/numbers.hpp"
#include "common/thread_rows.hpp"

namespace megazero {
namespace {

struct Slots {
  std::int64_t available;
  std::int64_t each;
  const std::int64_t* numbers;
  const float* weights;

  MEGAZERO_INLINE bool holds(std::int64_t at) const { return numbers[at] >= 0 && numbers[at] < available; }
  // A NaN loses what it carries, as store_both wants it.
  MEGAZERO_INLINE float weight(std::int64_t at) const {
    if (weights == nullptr) return 1.0f;
    return weights[at] != weights[at] ? NAN : weights[at];
  }
};

// The sum of exactly K rows, kept in registers.
template <int K, typename T>
MEGAZERO_INLINE void sum_of(const T* rows, Slots slots, T* to, std::int64_t first, std::int64_t width) {
  const T* row[K];
  float weight[K];
  for (int j = 0; j < K; ++j) {
    row[j] = rows + slots.numbers[first + j] * width;
    weight[j] = slots.weight(first + j);
  }
  std::int64_t c = 0;
  if constexpr (std::is_same_v<T, Bf16>) {
#pragma omp simd
    for (std::int64_t w = 0; w < width / 2; ++w) {
      float low = 0.0f, high = 0.0f;
      for (int j = 0; j < K; ++j) {
        low += weight[j] * load_low(row[j], w);
        high += weight[j] * load_high(row[j], w);
      }
      store_both(low, high, to, w);
    }
    c = width / 2 * 2;
  }
#pragma omp simd
  for (std::int64_t i = c; i < width; ++i) {
    float total = 0.0f;
    for (int j = 0; j < K; ++j) total += weight[j] * load(row[j] + i);
    store(total, to + i);
  }
}

// Of any number of rows, of which some may be missing; total is one row of scratch memory.
template <typename T>
MEGAZERO_INLINE void sum_of_some(const T* rows, Slots slots, T* to, std::int64_t first, std::int64_t width,
                                 float* total) {
  for (std::int64_t c = 0; c < width; ++c) total[c] = 0.0f;
  for (std::int64_t at = first; at < first + slots.each; ++at) {
    if (!slots.holds(at)) continue;
    const T* row = rows + slots.numbers[at] * width;
    const float weight = slots.weight(at);
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c) total[c] += weight * load(row + c);
  }
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c) store(total[c], to + c);
}

template <typename T>
MEGAZERO_CLONES void forward(const T* rows, Slots slots, T* out, std::int64_t begin, std::int64_t end,
                             std::int64_t width, float* total) {
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t first = i * slots.each;
    bool all = true;
    for (std::int64_t at = first; at < first + slots.each; ++at) all = all && slots.holds(at);
    T* to = out + i * width;
    if (all && slots.each == 1) {
      sum_of<1>(rows, slots, to, first, width);
    } else if (all && slots.each == 2) {
      sum_of<2>(rows, slots, to, first, width);
    } else if (all && slots.each == 4) {
      sum_of<4>(rows, slots, to, first, width);
    } else {
      sum_of_some(rows, slots, to, first, width, total);
    }
  }
}

// The inner product of a gradient and a row; `to` is the gradient times the weight.
template <typename T>
MEGAZERO_INLINE float product_of(const T* grad, const T* row, T* to, float weight, std::int64_t width) {
  float product = 0.0f;
  std::int64_t c = 0;
  if constexpr (std::is_same_v<T, Bf16>) {
#pragma omp simd reduction(+ : product)
    for (std::int64_t w = 0; w < width / 2; ++w) {
      const float low = load_low(grad, w), high = load_high(grad, w);
      product += low * load_low(row, w) + high * load_high(row, w);
      store_both(weight * low, weight * high, to, w);
    }
    c = width / 2 * 2;
  }
#pragma omp simd reduction(+ : product)
  for (std::int64_t i = c; i < width; ++i) {
    const float value = load(grad + i);
    product += value * load(row + i);
    store(weight * value, to + i);
  }
  return product;
}

// The same for two rows of one gradient, which is read and widened once; the two sums do not wait for each other.
template <typename T>
MEGAZERO_INLINE void products_of_two(const T* grad, const T* first_row, const T* second_row, T* first_to, T* second_to,
                                     float first_weight, float second_weight, std::int64_t width, float* products) {
  float first = 0.0f, second = 0.0f;
  std::int64_t c = 0;
  if constexpr (std::is_same_v<T, Bf16>) {
#pragma omp simd reduction(+ : first, second)
    for (std::int64_t w = 0; w < width / 2; ++w) {
      const float low = load_low(grad, w), high = load_high(grad, w);
      first += low * load_low(first_row, w) + high * load_high(first_row, w);
      second += low * load_low(second_row, w) + high * load_high(second_row, w);
      store_both(first_weight * low, first_weight * high, first_to, w);
      store_both(second_weight * low, second_weight * high, second_to, w);
    }
    c = width / 2 * 2;
  }
#pragma omp simd reduction(+ : first, second)
  for (std::int64_t i = c; i < width; ++i) {
    const float value = load(grad + i);
    first += value * load(first_row + i);
    second += value * load(second_row + i);
    store(first_weight * value, first_to + i);
    store(second_weight * value, second_to + i);
  }
  products[0] = first;
  products[1] = second;
}

template <typename T>
MEGAZERO_CLONES void backward(const T* rows, Slots slots, const T* grad, T* grad_rows, float* grad_weights,
                              std::int64_t begin, std::int64_t end, std::int64_t width) {
  for (std::int64_t i = begin; i < end; ++i) {
    const T* from = grad + i * width;
    std::int64_t at = i * slots.each;
    const std::int64_t last = at + slots.each;
    while (at < last) {
      if (!slots.holds(at)) {
        grad_weights[at++] = 0.0f;
        continue;
      }
      const T* row = rows + slots.numbers[at] * width;
      T* to = grad_rows + slots.numbers[at] * width;
      if (at + 1 < last && slots.holds(at + 1)) {
        const std::int64_t other = slots.numbers[at + 1] * width;
        products_of_two(from, row, rows + other, to, grad_rows + other, slots.weight(at), slots.weight(at + 1), width,
                        grad_weights + at);
        at += 2;
      } else {
        grad_weights[at] = product_of(from, row, to, slots.weight(at), width);
        ++at;
      }
    }
  }
}

template <typename T>
void clear_unused(const std::int64_t* choice, T* grad_rows, std::int64_t begin, std::int64_t end, std::int64_t width) {
  for (std::int64_t row = begin; row < end; ++row) {
    if (choice[row] < 0) std::memset(grad_rows + row * width, 0, static_cast<std::size_t>(width) * sizeof(T));
  }
}

}  // namespace
}  // namespace megazero

void megazero_gathered_sum_forward(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* rows,
                                   const std::int64_t* slots, const float* weights, void* out) {
  megazero::with_element(shape.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(shape.count, shape.width * each, shape.threads);
    megazero::ThreadRows totals(workers, shape.width);
    megazero::parallel_for(shape.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t worker) {
      megazero::forward(static_cast<const T*>(rows), {available, each, slots, weights}, static_cast<T*>(out), begin,
                        end, shape.width, totals.of(worker));
    });
  });
}

void megazero_gathered_sum_backward(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* rows,
                                    const std::int64_t* slots, const std::int64_t* choice, const float* weights,
                                    const void* grad, void* grad_rows, float* grad_weights) {
  megazero::with_element(shape.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(shape.count, shape.width * each, shape.threads);
    megazero::parallel_for(shape.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      megazero::backward(static_cast<const T*>(rows), {available, each, slots, weights}, static_cast<const T*>(grad),
                         static_cast<T*>(grad_rows), grad_weights, begin, end, shape.width);
    });
    megazero::parallel_for(available, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      megazero::clear_unused(choice, static_cast<T*>(grad_rows), begin, end, shape.width);
    });
  });
}
