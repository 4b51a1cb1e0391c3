#include "bias_dropout_add/cpu.hpp"

#include "common/clones.hpp"
#include "common/numbers.hpp"
#include "common/thread_rows.hpp"

namespace megazero {
namespace {

template <typename T>
MEGAZERO_CLONES void forward(const Keep& keep, const T* x, const float* bias, const T* residual, T* out,
                             std::int64_t begin, std::int64_t end, std::int64_t width) {
  for (std::int64_t row = begin; row < end; ++row) {
    const KeepRow kept = keep.row(row);
    const T *from = x + row * width, *beside = residual + row * width;
    T* to = out + row * width;
    if (bias == nullptr) {
#pragma omp simd
      for (std::int64_t i = 0; i < width; ++i) store(load(beside + i) + kept(i) * load(from + i), to + i);
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < width; ++i) {
        store(load(beside + i) + kept(i) * (load(from + i) + bias[i]), to + i);
      }
    }
  }
}

template <typename T>
MEGAZERO_CLONES void backward(const Keep& keep, const T* grad, T* grad_x, float* grad_bias, std::int64_t begin,
                              std::int64_t end, std::int64_t width) {
  for (std::int64_t row = begin; row < end; ++row) {
    const KeepRow kept = keep.row(row);
    const T* from = grad + row * width;
    T* to = grad_x + row * width;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      const float value = kept(i) * load(from + i);
      grad_bias[i] += value;
      store(value, to + i);
    }
  }
}

}  // namespace
}  // namespace megazero

void megazero_bias_dropout_add_forward(megazero::Rows rows, megazero::Keep keep, const void* x, const float* bias,
                                       const void* residual, void* out) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      megazero::forward(keep, static_cast<const T*>(x), bias, static_cast<const T*>(residual), static_cast<T*>(out),
                        begin, end, rows.width);
    });
  });
}

void megazero_bias_dropout_add_backward(megazero::Rows rows, megazero::Keep keep, const void* grad, void* grad_x,
                                        float* grad_bias) {
  const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
  megazero::ThreadRows sums(workers, rows.width);
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t worker) {
      megazero::backward(keep, static_cast<const T*>(grad), static_cast<T*>(grad_x), sums.of(worker), begin, end,
                         rows.width);
    });
  });
  if (grad_bias != nullptr) sums.write_sum(grad_bias);
}
