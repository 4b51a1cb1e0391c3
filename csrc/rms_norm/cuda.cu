// Root-mean-square normalization of rows (Zhang & Sennrich 2019), of x or of total = x + residual, which is then
// written too. weight: [width] of x's type or fp32. statistics: scale = 1 / sqrt(mean(x^2) + eps), fp32 [count], and
// behind it the counters of backward's sums. grad_parameters: [sets, width] of the weight's type, its gradient and, as
// the second set if there are two, the sum of grad_x over rows. partials: fp32 [groups, sets, width], scratch. groups:
// how many groups of threads add these up. Null: residual and total, if nothing is added; grad_total, if no gradient
// arrives for it.
#include "common/cuda_norm.hpp"

namespace megazero {

// One block that must fit: without that hint ptxas allows itself 32 registers, and spills.
template <typename T, typename P, int N, bool whole>
__global__ void __launch_bounds__(1024, 1)
    rms_norm_forward(std::int64_t count, int width, Global<const T> x, Global<const T> residual, Cached<P> weight,
                     float eps, Global<T> total, Global<T> y, Global<float> scale, Global<int> counters, int counted) {
  using Row = Tile<N, whole>;
  const int tiles = Row::count(width);
  const Global<const T> normalized = residual ? Global<const T>(total) : x;
  Row tile, scaled;
  clear_counters(counters, counted);
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    float sum[1] = {0.0f};
    for (int t = 0; t < tiles; ++t) {
      load_total(tile, x, residual, total, row * width, width, t);
      Row::each([&](int k, int n) { sum[0] += tile.value[k][n] * tile.value[k][n]; });
    }
    row_sums(sum);
    const float factor = rsqrtf(sum[0] / static_cast<float>(width) + eps);
    if (threadIdx.x == 0) scale[row] = factor;
    for (int t = 0; t < tiles; ++t) {
      if (!whole) tile.load(normalized + row * width, width, t);
      scaled.load(weight, width, t);
      Row::each([&](int k, int n) { scaled.value[k][n] *= tile.value[k][n] * factor; });
      scaled.store(y + row * width, width, t);
    }
  }
}

// With n = x * scale and g = grad_y * weight: grad_x = scale * (g - n * mean(g * n)), grad_weight = sum(grad_y * n).
template <typename T, typename P, int N, bool whole>
__global__ void __launch_bounds__(1024)
    rms_norm_backward(std::int64_t count, int width, int sets, Global<const T> x, Cached<P> weight,
                      Global<const float> scale, Global<const T> grad_y, Global<const T> grad_total, Global<T> grad_x,
                      Global<float> partials, Global<int> counters, Global<P> grad_parameters) {
  using Row = Tile<N, whole>;
  const int tiles = Row::count(width);
  const bool sums_grad = sets == 2;
  const auto own = [&] { return partials + sets * first_row() * width; };  // asked for, not kept: registers are few
  Row normed, grad, parameter, summed;
  HeldSums<N, whole> grad_sum;
  if (sums_grad) grad_sum.clear();
  const auto clear = [&] { Row::each([&](int k, int n) { summed.value[k][n] = 0.0f; }); };
  clear();
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const float factor = scale[row];
    const auto read = [&](int t) {
      normed.load(x + row * width, width, t);
      grad.load(grad_y + row * width, width, t);
      Row::each([&](int k, int n) { normed.value[k][n] *= factor; });
    };
    const auto add_to_sum = [&] {
      Row::each([&](int k, int n) { summed.value[k][n] += grad.value[k][n] * normed.value[k][n]; });
    };
    const auto times_weight = [&](int t) {
      parameter.load(weight, width, t);
      Row::each([&](int k, int n) { grad.value[k][n] *= parameter.value[k][n]; });
    };
    float sum[1] = {0.0f};
    for (int t = 0; t < tiles; ++t) {
      read(t);
      if (whole) add_to_sum();
      times_weight(t);
      Row::each([&](int k, int n) { sum[0] += grad.value[k][n] * normed.value[k][n]; });
    }
    row_sums(sum);
    const float mean = sum[0] / static_cast<float>(width);
    for (int t = 0; t < tiles; ++t) {
      if (!whole) {
        read(t);
        clear();
        if (row != first_row()) summed.load(own(), width, t);
        add_to_sum();
        summed.store(own(), width, t);
        times_weight(t);
      }
      Row::each([&](int k, int n) {
        grad.value[k][n] = factor * (grad.value[k][n] - normed.value[k][n] * mean);
      });
      add_grad(grad, grad_total, row * width, width, t);
      grad.store(grad_x + row * width, width, t);
      if (sums_grad) grad_sum.add(grad, own() + width, width, t, row == first_row());
    }
  }
  if (whole || first_row() >= count) {
    for (int t = 0; t < tiles; ++t) {
      summed.store(own(), width, t);
      if (sums_grad) grad_sum.store(own() + width, width, t);
    }
  }
  add_up_groups<N>(partials, sets * width, counters, grad_parameters);
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_rms_norm_forward(std::int64_t dtype, std::int64_t parameter_dtype, std::int64_t count,
                                              std::int64_t width, const void* x, const void* residual,
                                              const void* weight, double eps, void* total, void* y,
                                              std::int64_t counted, float* statistics, void* stream) {
  if (count == 0 || width == 0) return 0;
  int* counters = counters_behind(statistics + count);
  const RowLaunch launch = row_launch(count, width);
  return with_elements(dtype, parameter_dtype, [&](auto element, auto parameter) {
    using T = decltype(element);
    using P = decltype(parameter);
    const auto start = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((rms_norm_forward<T, P, pack(), whole()>), launch.blocks, launch.threads, 0, stream, count,
                             width, static_cast<const T*>(x), static_cast<const T*>(residual),
                             static_cast<const P*>(weight), eps,
                             static_cast<T*>(total), static_cast<T*>(y), statistics, counters, counted);
    };
    return with_row_shape<T>(launch, width, start, x, residual, weight, total, y);
  });
}
MEGAZERO_EXPORT(rms_norm_forward)

extern "C" int megazero_cuda_rms_norm_backward(std::int64_t dtype, std::int64_t parameter_dtype, std::int64_t count,
                                               std::int64_t width, std::int64_t groups, std::int64_t sets,
                                               const void* x, const void* weight, float* statistics,
                                               const void* grad_y, const void* grad_total, void* grad_x,
                                               void* grad_parameters, float* partials, void* stream) {
  if (width == 0) return 0;
  if (!holds<int>(sets * width)) return kInvalidValue;
  const RowLaunch launch = row_launch(count, width, groups);
  int* counters = counters_behind(statistics + count);
  return with_elements(dtype, parameter_dtype, [&](auto element, auto parameter) {
    using T = decltype(element);
    using P = decltype(parameter);
    const auto start = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((rms_norm_backward<T, P, pack(), whole()>), launch.blocks, launch.threads,
                             held_bytes<whole()>(launch, sets == 2), stream, count, width, sets,
                             static_cast<const T*>(x), static_cast<const P*>(weight), statistics,
                             static_cast<const T*>(grad_y), static_cast<const T*>(grad_total), static_cast<T*>(grad_x),
                             partials, counters, static_cast<P*>(grad_parameters));
    };
    return with_row_shape<T>(launch, width, start, x, weight, grad_y, grad_total, grad_x, partials, grad_parameters);
  });
}
MEGAZERO_EXPORT(rms_norm_backward)
