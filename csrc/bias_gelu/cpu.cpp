#include "bias_gelu/cpu.hpp"

#include "common/clones.hpp"
#include "common/exponential.hpp"
#include "common/numbers.hpp"

namespace megazero {
namespace {

constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

// Beyond 10 the gate is 0 or 1 to the last bit. With z clamped there, z^3 cannot overflow and exp needs no care.
MEGAZERO_INLINE float held(float z) {
  const float low = z < -10.0f ? -10.0f : z;
  return low > 10.0f ? 10.0f : low;
}

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)): one exp and one division, for z within 10.
MEGAZERO_INLINE float gate(float z) {
  return 1.0f / (1.0f + exponential_within(-kTwoRootTwoOverPi * z * (1.0f + kCubic * z * z)));
}

MEGAZERO_INLINE float gelu(float z) { return z * (z < -10.0f ? 0.0f : gate(held(z))); }

MEGAZERO_INLINE float gelu_slope(float z) {
  const float c = held(z);
  const float s = gate(c);
  return s + c * s * (1.0f - s) * kTwoRootTwoOverPi * (1.0f + 3.0f * kCubic * c * c);
}

template <bool kBiased, typename T>
MEGAZERO_CLONES void forward(const T* x, const float* bias, T* y, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    store(gelu(kBiased ? load(x + i) + bias[i] : load(x + i)), y + i);
  }
}

template <bool kBiased, typename T>
MEGAZERO_CLONES void backward(const T* x, const float* bias, const T* grad_y, T* grad_x, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    store(load(grad_y + i) * gelu_slope(kBiased ? load(x + i) + bias[i] : load(x + i)), grad_x + i);
  }
}

// Without a bias the rows do not matter, and the elements form one range.
template <typename T>
void forward_all(const Rows& rows, const T* x, const float* bias, T* y) {
  const int workers = workers_for(rows.count, rows.width, rows.threads);
  if (bias == nullptr) {
    parallel_for(rows.count * rows.width, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      forward<false>(x + begin, bias, y + begin, end - begin);
    });
    return;
  }
  parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t row = begin; row < end; ++row) {
      forward<true>(x + row * rows.width, bias, y + row * rows.width, rows.width);
    }
  });
}

template <typename T>
void backward_all(const Rows& rows, const T* x, const float* bias, const T* grad_y, T* grad_x) {
  const int workers = workers_for(rows.count, rows.width, rows.threads);
  if (bias == nullptr) {
    parallel_for(rows.count * rows.width, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      backward<false>(x + begin, bias, grad_y + begin, grad_x + begin, end - begin);
    });
    return;
  }
  parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t at = row * rows.width;
      backward<true>(x + at, bias, grad_y + at, grad_x + at, rows.width);
    }
  });
}

}  // namespace
}  // namespace megazero

void megazero_bias_gelu_forward(megazero::Rows rows, const void* x, const float* bias, void* y) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    megazero::forward_all(rows, static_cast<const T*>(x), bias, static_cast<T*>(y));
  });
}

void megazero_bias_gelu_backward(megazero::Rows rows, const void* x, const float* bias, const void* grad_y,
                                 void* grad_x) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    megazero::backward_all(rows, static_cast<const T*>(x), bias, static_cast<const T*>(grad_y),
                           static_cast<T*>(grad_x));
  });
}
