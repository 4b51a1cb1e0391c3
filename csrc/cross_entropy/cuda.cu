// The parts of vocab-parallel cross-entropy that read the logits (Shoeybi et al. 2019), each in one pass.
//
// In each of `count` rows of `stride` logits the first `columns` count; the rest are padding. local: int64 [count], the
// target's column here, or -1 if another rank holds it. Everything else is fp32 [count].
#include <limits>

#include "common/cuda_rows.hpp"

namespace megazero {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Each row's maximum (the lowest float for a row of -inf), sum of exp(logit - maximum), and target's logit or 0. A
// thread keeps the largest that it has seen, and scales its sum when it sees a larger one (Milakov & Gimelshein 2018).
// A NaN is never the maximum, but it makes the sum NaN.
template <typename T, int N>
__global__ void __launch_bounds__(1024)
    cross_entropy_statistics(std::int64_t count, int stride, int columns, Global<const T> logits,
                             Global<const std::int64_t> local, Global<float> maximum, Global<float> total,
                             Global<float> picked) {
  using Row = Tile<N, false>;
  const int tiles = Row::count(columns);
  Row tile;
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const Global<const T> of_row = logits + row * stride;
    if (threadIdx.x == 0) {
      const std::int64_t target = local[row];
      picked[row] = target < 0 ? 0.0f : to_float(of_row[target]);
    }
    float seen = kLowest, sum[1] = {0.0f};
    for (int t = 0; t < tiles; ++t) {
      tile.load(of_row, columns, t, kNothing);
      float largest = seen;
      Row::each([&](int k, int n) {
        if (N > 1 && Row::at(t, k) + n >= columns) tile.value[k][n] = kNothing;
        largest = tile.value[k][n] > largest ? tile.value[k][n] : largest;
      });
      sum[0] *= expf(seen - largest);
      seen = largest;
      Row::each([&](int k, int n) { sum[0] += expf(tile.value[k][n] - seen); });
    }
    const float of_all = row_max(seen);
    sum[0] *= expf(seen - of_all);
    row_sums(sum);
    if (threadIdx.x == 0) {
      maximum[row] = of_all;
      total[row] = sum[0];
    }
  }
}

// grad_logits [count, stride] = grad (exp(logit - normalizer) - [column is the target]), 0 in the padding. A thread
// writes where it has read, so grad_logits may be the logits.
template <typename T, int N>
__global__ void __launch_bounds__(1024)
    cross_entropy_gradient(std::int64_t count, int stride, int columns, Global<const T> logits,
                           Global<const std::int64_t> local, Global<const float> normalizer, Global<const float> grad,
                           Global<T> grad_logits) {
  using Row = Tile<N, false>;
  const int tiles = Row::count(stride);
  Row tile;
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const std::int64_t target = local[row];
    const float shift = normalizer[row], factor = grad[row];
    for (int t = 0; t < tiles; ++t) {
      tile.load(logits + row * stride, columns, t);
      Row::each([&](int k, int n) {
        const int column = Row::at(t, k) + n;
        const float hit = column == target ? 1.0f : 0.0f;
        tile.value[k][n] = column < columns ? (expf(tile.value[k][n] - shift) - hit) * factor : 0.0f;
      });
      tile.store(grad_logits + row * stride, stride, t);
    }
  }
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_cross_entropy_statistics(std::int64_t dtype, std::int64_t count, std::int64_t stride,
                                                      std::int64_t columns, const void* logits,
                                                      const std::int64_t* local, float* maximum, float* total,
                                                      float* picked, void* stream) {
  if (count == 0) return 0;
  const RowLaunch launch = row_launch(count, columns);
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack, auto) {
      return MEGAZERO_LAUNCH((cross_entropy_statistics<T, pack()>), launch.blocks, launch.threads, 0, stream, count,
                             stride, columns, static_cast<const T*>(logits), local, maximum, total, picked);
    };
    return with_row_shape<T>(launch, stride, start, logits);
  });
}
MEGAZERO_EXPORT(cross_entropy_statistics)

extern "C" int megazero_cuda_cross_entropy_gradient(std::int64_t dtype, std::int64_t count, std::int64_t stride,
                                                    std::int64_t columns, const void* logits, const std::int64_t* local,
                                                    const float* normalizer, const float* grad, void* grad_logits,
                                                    void* stream) {
  if (count == 0 || stride == 0) return 0;
  const RowLaunch launch = row_launch(count, stride);
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack, auto) {
      return MEGAZERO_LAUNCH((cross_entropy_gradient<T, pack()>), launch.blocks, launch.threads, 0, stream, count,
                             stride, columns, static_cast<const T*>(logits), local, normalizer, grad,
                             static_cast<T*>(grad_logits));
    };
    return with_row_shape<T>(launch, stride, start, logits, grad_logits);
  });
}
MEGAZERO_EXPORT(cross_entropy_gradient)
