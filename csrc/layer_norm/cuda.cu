// Layer normalization of rows (Ba, Kiros & Hinton 2016), of x or of total = x + residual, which is then written too.
// weight, bias: [width] of x's type or fp32. statistics: fp32 [2, count], mean and scale = 1 / sqrt(variance + eps), and
// behind them the counters of backward's sums. grad_parameters: [sets, width] of the weight's type, its gradient, the
// bias's and, as the third set if there are three, the sum of grad_x over rows. partials: fp32 [groups, sets, width],
// scratch. groups: how many groups of threads add these up. Null: residual and total, if nothing is added; grad_total,
// if no gradient arrives for it.
#include "common/cuda_norm.hpp"

namespace megazero {

// What a thread knows of the elements that it has seen: how many they are, their mean and the sum of the squares of
// their distances from it.
struct Moments {
  float count = 0.0f, mean = 0.0f, squares = 0.0f;

  // Adds the tile's elements to them (Chan, Golub & LeVeque 1983): nothing large is ever subtracted from its like.
  template <int N, bool whole>
  __device__ __forceinline__ void add(const Tile<N, whole>& tile, int width, int t) {
    using Row = Tile<N, whole>;
    float seen = 0.0f, sum = 0.0f, spread = 0.0f;
    Row::each([&](int k, int n) {
      if (Row::at(t, k) < width) seen += 1.0f;
      sum += tile.value[k][n];
    });
    if (seen == 0.0f) return;
    const float middle = sum / seen;
    Row::each([&](int k, int n) {
      const float distance = tile.value[k][n] - middle;
      if (Row::at(t, k) < width) spread += distance * distance;
    });
    const float apart = middle - mean, share = seen / (count + seen);
    mean += apart * share;
    squares += spread + apart * apart * count * share;
    count += seen;
  }
};

// One block that must fit: without that hint ptxas allows itself 32 registers, and spills.
template <typename T, typename P, int N, bool whole>
__global__ void __launch_bounds__(1024, 1)
    layer_norm_forward(std::int64_t count, int width, Global<const T> x, Global<const T> residual,
                       Cached<P> weight, Cached<P> bias, float eps, Global<T> total, Global<T> y,
                       Global<float> mean, Global<float> scale, Global<int> counters, int counted) {
  using Row = Tile<N, whole>;
  const int tiles = Row::count(width);
  Row tile, parameter;
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    Moments moments;
    for (int t = 0; t < tiles; ++t) {
      load_total(tile, x, residual, total, row * width, width, t);
      moments.add(tile, width, t);
    }
    float sum[1] = {moments.count * moments.mean};
    row_sums(sum);
    const float middle = sum[0] / static_cast<float>(width), apart = moments.mean - middle;
    sum[0] = moments.squares + moments.count * apart * apart;
    row_sums(sum);
    const float factor = rsqrtf(sum[0] / static_cast<float>(width) + eps);
    if (threadIdx.x == 0) {
      mean[row] = middle;
      scale[row] = factor;
    }
    for (int t = 0; t < tiles; ++t) {
      if (!whole) tile.load((residual ? Global<const T>(total) : x) + row * width, width, t);
      parameter.load(weight, width, t);
      Row::each([&](int k, int n) { tile.value[k][n] = (tile.value[k][n] - middle) * factor * parameter.value[k][n]; });
      parameter.load(bias, width, t);
      Row::each([&](int k, int n) { tile.value[k][n] += parameter.value[k][n]; });
      tile.store(y + row * width, width, t);
    }
  }
  clear_counters(counters, counted);
}

// With n = (x - mean) * scale and g = grad_y * weight: grad_x = scale * (g - mean(g) - n * mean(g * n)), grad_weight =
// sum(grad_y * n), grad_bias = sum(grad_y). Sums of grad_x lie in shared memory, since registers are few.
template <typename T, typename P, int N, bool whole>
__global__ void __launch_bounds__(1024)
    layer_norm_backward(std::int64_t count, int width, int sets, Global<const T> x, Cached<P> weight,
                        Global<const float> mean, Global<const float> scale, Global<const T> grad_y,
                        Global<const T> grad_total, Global<T> grad_x, Global<float> partials, Global<int> counters,
                        Global<P> grad_parameters) {
  using Row = Tile<N, whole>;
  const int tiles = Row::count(width);
  const bool sums_grad = sets == 3;
  const Global<float> own_weight = partials + sets * first_row() * width, own_bias = own_weight + width;
  Row normed, grad, parameter, weight_sum, bias_sum;
  HeldSums<N, whole> grad_sum;
  if (sums_grad) grad_sum.clear();
  const auto clear = [&] { Row::each([&](int k, int n) { weight_sum.value[k][n] = bias_sum.value[k][n] = 0.0f; }); };
  const auto store_sums = [&](int t) {
    weight_sum.store(own_weight, width, t);
    bias_sum.store(own_bias, width, t);
  };
  clear();
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const float middle = mean[row], factor = scale[row];
    const auto read = [&](int t) {
      normed.load(x + row * width, width, t);
      grad.load(grad_y + row * width, width, t);
      Row::each([&](int k, int n) { normed.value[k][n] = (normed.value[k][n] - middle) * factor; });
    };
    const auto add_to_sums = [&] {
      Row::each([&](int k, int n) {
        weight_sum.value[k][n] += grad.value[k][n] * normed.value[k][n];
        bias_sum.value[k][n] += grad.value[k][n];
      });
    };
    const auto times_weight = [&](int t) {
      parameter.load(weight, width, t);
      Row::each([&](int k, int n) { grad.value[k][n] *= parameter.value[k][n]; });
    };
    float sums[2] = {0.0f, 0.0f};
    for (int t = 0; t < tiles; ++t) {
      read(t);
      if (whole) add_to_sums();
      times_weight(t);
      Row::each([&](int k, int n) {
        sums[0] += grad.value[k][n];
        sums[1] += grad.value[k][n] * normed.value[k][n];
      });
    }
    row_sums(sums);
    const float mean_grad = sums[0] / static_cast<float>(width), mean_product = sums[1] / static_cast<float>(width);
    for (int t = 0; t < tiles; ++t) {
      if (!whole) {
        read(t);
        clear();
        if (row != first_row()) {
          weight_sum.load(own_weight, width, t);
          bias_sum.load(own_bias, width, t);
        }
        add_to_sums();
        store_sums(t);
        times_weight(t);
      }
      Row::each([&](int k, int n) {
        grad.value[k][n] = factor * (grad.value[k][n] - mean_grad - normed.value[k][n] * mean_product);
      });
      add_grad(grad, grad_total, row * width, width, t);
      grad.store(grad_x + row * width, width, t);
      if (sums_grad) grad_sum.add(grad, own_bias + width, width, t, row == first_row());
    }
  }
  if (whole || first_row() >= count) {
    for (int t = 0; t < tiles; ++t) {
      store_sums(t);
      if (sums_grad) grad_sum.store(own_bias + width, width, t);
    }
  }
  add_up_groups<N>(partials, sets * width, counters, grad_parameters);
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_layer_norm_forward(std::int64_t dtype, std::int64_t parameter_dtype,
                                                std::int64_t count, std::int64_t width, const void* x,
                                                const void* residual, const void* weight, const void* bias, double eps,
                                                void* total, void* y, std::int64_t counted, float* statistics,
                                                void* stream) {
  if (count == 0 || width == 0) return 0;
  const RowLaunch launch = row_launch(count, width);
  float *mean = statistics, *scale = mean + count;
  int* counters = counters_behind(scale + count);
  return with_elements(dtype, parameter_dtype, [&](auto element, auto parameter) {
    using T = decltype(element);
    using P = decltype(parameter);
    const auto start = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((layer_norm_forward<T, P, pack(), whole()>), launch.blocks, launch.threads, 0, stream,
                             count, width, static_cast<const T*>(x), static_cast<const T*>(residual),
                             static_cast<const P*>(weight), static_cast<const P*>(bias), eps,
                             static_cast<T*>(total), static_cast<T*>(y), mean, scale, counters, counted);
    };
    return with_row_shape<T>(launch, width, start, x, residual, weight, bias, total, y);
  });
}
MEGAZERO_EXPORT(layer_norm_forward)

extern "C" int megazero_cuda_layer_norm_backward(std::int64_t dtype, std::int64_t parameter_dtype,
                                                 std::int64_t count, std::int64_t width, std::int64_t groups,
                                                 std::int64_t sets, const void* x, const void* weight,
                                                 float* statistics, const void* grad_y, const void* grad_total,
                                                 void* grad_x, void* grad_parameters, float* partials, void* stream) {
  if (width == 0) return 0;
  if (!holds<int>(sets * width)) return kInvalidValue;
  const RowLaunch launch = row_launch(count, width, groups);
  const float *mean = statistics, *scale = mean + count;
  int* counters = counters_behind(statistics + 2 * count);
  return with_elements(dtype, parameter_dtype, [&](auto element, auto parameter) {
    using T = decltype(element);
    using P = decltype(parameter);
    const auto start = [&](auto pack, auto whole) {
      // The addresses of a row that is not in packs leave no registers in which to keep it.
      constexpr bool kept = whole() && pack() > 1;
      return MEGAZERO_LAUNCH((layer_norm_backward<T, P, pack(), kept>), launch.blocks, launch.threads,
                             held_bytes<kept>(launch, sets == 3), stream, count, width, sets, static_cast<const T*>(x),
                             static_cast<const P*>(weight), mean, scale, static_cast<const T*>(grad_y),
                             static_cast<const T*>(grad_total), static_cast<T*>(grad_x), partials, counters,
                             static_cast<P*>(grad_parameters));
    };
    return with_row_shape<T>(launch, width, start, x, weight, grad_y, grad_total, grad_x, partials, grad_parameters);
  });
}
MEGAZERO_EXPORT(layer_norm_backward)
