// GELU of z = x + bias (Hendrycks & Gimpel 2016), with erf or in the tanh form, for x [count, width]. bias: fp32 [width],
// or null. sums: the sum of grad_x over rows, [width] of x's type, which is the gradient of that bias or of one that x
// holds already; or null, and then partials, fp32 [groups, width], and counters are not used. groups: how many groups of
// threads add it up.
#include "common/cuda_columns.hpp"
#include "common/cuda_sums.hpp"

namespace megazero {

constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;
constexpr float kRootHalf = 0.70710678118654752f;
constexpr float kNormalPeak = 0.39894228040143268f;  // 1 / sqrt(2 pi)

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (z + 0.044715 z^3).
__device__ __forceinline__ float gate(float z) {
  return 1.0f / (1.0f + expf(-kTwoRootTwoOverPi * z * (1.0f + kCubic * z * z)));
}

template <bool exact>
__device__ __forceinline__ float gelu(float z) {
  return exact ? 0.5f * z * (1.0f + erff(z * kRootHalf)) : z * gate(z);
}

// Beyond 15 the slope is 0 or 1 to the last bit, and z is held there: infinity times 0 would be NaN.
template <bool exact>
__device__ __forceinline__ float gelu_slope(float z) {
  const float low = z < -15.0f ? -15.0f : z, held = low > 15.0f ? 15.0f : low, square = held * held;
  if (exact) return 0.5f * (1.0f + erff(held * kRootHalf)) + held * kNormalPeak * expf(-0.5f * square);
  const float s = gate(held);
  return s + held * s * (1.0f - s) * kTwoRootTwoOverPi * (1.0f + 3.0f * kCubic * square);
}

template <typename T, int N, bool exact>
__global__ void __launch_bounds__(128)
    bias_gelu_forward(std::int64_t count, std::int64_t width, Global<const T> x, Cached<float> bias, Global<T> y,
                      Global<int> counters, int counted) {
  clear_counters(counters, counted);
  const std::int64_t first = first_column<N>();
  if (first >= width) return;
  Columns<N> shift = {}, z;
  if (bias) shift.load(bias, width, first);
#pragma unroll 1
  for (std::int64_t row = own_row(); row < count; row += rows_at_once()) {
    z.load(x + row * width, width, first);
    z.each([&](int n) { z.value[n] = gelu<exact>(z.value[n] + shift.value[n]); });
    z.store(y + row * width, width, first);
  }
}

template <typename T, int N, bool exact>
__global__ void __launch_bounds__(128, 8)
    bias_gelu_backward(std::int64_t count, std::int64_t width, std::int64_t groups, Global<const T> x,
                       Cached<float> bias, Global<const T> grad_y, Global<T> grad_x, Global<float> partials,
                       Global<int> counters, Global<T> sums) {
  const std::int64_t first = first_column<N>(), group = own_row();
  if (first < width && group < groups) {
    Columns<N> shift = {}, sum = {}, z, grad;
    if (bias) shift.load(bias, width, first);
#pragma unroll 1
    for (std::int64_t row = group; row < count; row += groups) {
      z.load(x + row * width, width, first);
      grad.load(grad_y + row * width, width, first);
      z.each([&](int n) {
        grad.value[n] *= gelu_slope<exact>(z.value[n] + shift.value[n]);
        sum.value[n] += grad.value[n];
      });
      grad.store(grad_x + row * width, width, first);
    }
    if (sums) sum.store(partials + group * width, width, first);
  }
  if (sums) add_up_columns<N>(partials, static_cast<int>(groups), static_cast<int>(width), counters, sums);
}

// Calls body with the kernels' constants: an element, and whether erf is used.
template <typename Body>
int with_form(std::int64_t dtype, std::int64_t exact, const Body& body) {
  return with_element(dtype, [&](auto element) {
    return exact ? body(element, std::true_type{}) : body(element, std::false_type{});
  });
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_bias_gelu_forward(std::int64_t dtype, std::int64_t exact, std::int64_t count,
                                               std::int64_t width, const void* x, const float* bias, void* y,
                                               std::int64_t counted, int* counters, void* stream) {
  // Without rows there are still counters to clear: backward sums nothing by them.
  if (width == 0 || (count == 0 && counted == 0)) return 0;
  const std::int64_t rows = bias ? count : 1, columns = bias ? width : count * width;
  return with_form(dtype, exact, [&](auto element, auto form) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      const std::int64_t takers = std::max<std::int64_t>(std::min(rows, column_groups(rows, columns)), 1);
      const ColumnLaunch launch = column_launch(takers, std::max<std::int64_t>(columns, 1), pack());
      return MEGAZERO_LAUNCH((bias_gelu_forward<T, pack(), form()>), launch.blocks, launch.threads, 0, stream, rows,
                             columns, static_cast<const T*>(x), bias, static_cast<T*>(y), counters, counted);
    };
    return with_columns<T>(bias == nullptr, columns, start, x, bias, y);
  });
}
MEGAZERO_EXPORT(bias_gelu_forward)

extern "C" int megazero_cuda_bias_gelu_backward(std::int64_t dtype, std::int64_t exact, std::int64_t count,
                                                std::int64_t width, std::int64_t groups, const void* x,
                                                const float* bias, const void* grad_y, void* grad_x, void* sums,
                                                float* partials, int* counters, void* stream) {
  if (width == 0 || (count == 0 && sums == nullptr)) return 0;
  if (sums != nullptr && !holds<int>(width + kColumnBlock * 8)) return kInvalidValue;
  if (sums == nullptr && bias != nullptr) return kInvalidValue;  // the matrix is then read as one row
  const std::int64_t rows = sums ? count : 1, columns = sums ? width : count * width;
  const std::int64_t takers = sums ? groups : 1;
  return with_form(dtype, exact, [&](auto element, auto form) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      const ColumnLaunch launch = column_launch(takers, columns, pack());
      return MEGAZERO_LAUNCH((bias_gelu_backward<T, pack(), form()>), launch.blocks, launch.threads, 0, stream, rows,
                             columns, takers, static_cast<const T*>(x), bias, static_cast<const T*>(grad_y),
                             static_cast<T*>(grad_x), partials, counters, static_cast<T*>(sums));
    };
    return with_columns<T>(sums == nullptr, columns, start, x, bias, grad_y, grad_x, partials, sums);
  });
}
MEGAZERO_EXPORT(bias_gelu_backward)
