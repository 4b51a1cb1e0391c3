// Weighted sums of rows gathered by number: what experts return to their tokens (the unpermute of a mixture of
// experts). out[i] = sum over j of weights[i, j] rows[slots[i, j]], in order of j and in fp32.
//
// rows: [available, width]; slots: int64 [count, each], distinct numbers of rows; any other number stands for none and
// adds nothing. weights: fp32 [count, each], or null for ones; out: [count, width]. Backward goes by sums, not by rows:
// each reads its gradient once, and nothing is added in memory, as no two slots share a row.
#include "common/cuda_rows.hpp"

namespace megazero {

constexpr int kSlotsAtOnce = 4;

struct Slots {
  std::int64_t available;
  int each;
  Cached<std::int64_t> numbers;
  Cached<float> weights;

  // The row of a slot; -1 if it has none.
  __device__ __forceinline__ std::int64_t row(std::int64_t at) const {
    const std::int64_t number = numbers[at];
    return number < available ? number : -1;
  }
  __device__ __forceinline__ float weight(std::int64_t at) const {
    return weights ? static_cast<float>(weights[at]) : 1.0f;
  }
};

// A thread takes N columns of a sum, and loads them of several rows before it adds them up.
template <typename T, int N>
__global__ void __launch_bounds__(1024)
    gathered_sum_forward(std::int64_t count, int width, Slots slots, Global<const T> rows, Global<T> out) {
  const int stride = static_cast<int>(blockDim.x) * N;
  for (std::int64_t i = first_row(); i < count; i += row_stride()) {
    for (int column = static_cast<int>(threadIdx.x) * N; column < width; column += stride) {
      float sum[N];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = 0.0f;
      for (int first = 0; first < slots.each; first += kSlotsAtOnce) {
        Pack<T, N> found[kSlotsAtOnce];
        float weight[kSlotsAtOnce];
        bool there[kSlotsAtOnce];
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) {
          const std::int64_t at = i * slots.each + first + j;
          const std::int64_t row = first + j < slots.each ? slots.row(at) : -1;
          there[j] = row >= 0;
          if (there[j]) {
            weight[j] = slots.weight(at);
            found[j] = load_pack<N>(rows + row * width, column);
          }
        }
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) {
          if (!there[j]) continue;
#pragma unroll
          for (int n = 0; n < N; ++n) sum[n] += weight[j] * to_float(found[j].at[n]);
        }
      }
      Pack<T, N> pack;
#pragma unroll
      for (int n = 0; n < N; ++n) pack.at[n] = from_float<T>(sum[n]);
      store_pack<N>(out + i * width, column, pack);
    }
  }
}

// For each slot with row r: grad_rows[r] = weight * grad[i], and its weight's gradient is the product of grad[i] and
// rows[r]. grad_weights: fp32 [count, each], or null without weights; rows are then not read.
template <typename T, int N, bool whole>
__global__ void __launch_bounds__(1024, 1)
    gathered_sum_backward(std::int64_t count, int width, Slots slots, Global<const T> rows, Global<const T> grad,
                          Global<T> grad_rows, Global<float> grad_weights) {
  using Row = Tile<N, whole>;
  const int tiles = Row::count(width);
  Row own, other;
  for (std::int64_t i = first_row(); i < count; i += row_stride()) {
    if (whole) own.load(grad + i * width, width, 0);
    for (int j = 0; j < slots.each; ++j) {
      const std::int64_t at = i * slots.each + j, row = slots.row(at);
      float product[1] = {0.0f};
      if (row >= 0) {
        const float weight = slots.weight(at);
        for (int t = 0; t < tiles; ++t) {
          if (!whole) own.load(grad + i * width, width, t);
          if (grad_weights) {
            other.load(rows + row * width, width, t);
            Row::each([&](int k, int n) { product[0] += own.value[k][n] * other.value[k][n]; });
          }
          Row::each([&](int k, int n) { other.value[k][n] = weight * own.value[k][n]; });
          other.store(grad_rows + row * width, width, t);
        }
      }
      if (!grad_weights) continue;
      row_sums(product);
      if (threadIdx.x == 0) grad_weights[at] = product[0];
    }
  }
}

// Zeros for the rows that no sum took. choice: int64 [available], negative for those.
template <typename T, int N>
__global__ void __launch_bounds__(1024)
    gathered_sum_clear(std::int64_t available, int width, Cached<std::int64_t> choice, Global<T> grad_rows) {
  Pack<T, N> zeros;
#pragma unroll
  for (int n = 0; n < N; ++n) zeros.at[n] = from_float<T>(0.0f);
  for (std::int64_t row = first_row(); row < available; row += row_stride()) {
    if (choice[row] >= 0) continue;
    for (int column = static_cast<int>(threadIdx.x) * N; column < width; column += static_cast<int>(blockDim.x) * N) {
      store_pack<N>(grad_rows + row * width, column, zeros);
    }
  }
}

// At most as many slots as an int counts.
inline bool slots_fit(std::int64_t each) { return each >= 0 && each <= 2147483647 - kSlotsAtOnce; }

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_gathered_sum_forward(std::int64_t dtype, std::int64_t count, std::int64_t width,
                                                  std::int64_t available, std::int64_t each, const void* rows,
                                                  const std::int64_t* slots, const float* weights, void* out,
                                                  void* stream) {
  if (count == 0 || width == 0) return 0;
  if (!slots_fit(each)) return 1;
  const RowLaunch launch = row_launch(count, width);
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack, auto) {
      return MEGAZERO_LAUNCH((gathered_sum_forward<T, pack()>), launch.blocks, launch.threads, 0, stream, count, width,
                             (Slots{available, static_cast<int>(each), slots, weights}),
                             static_cast<const T*>(rows), static_cast<T*>(out));
    };
    return with_row_shape<T>(launch, width, start, rows, out);
  });
}
MEGAZERO_EXPORT(gathered_sum_forward)

// all_taken: whether every row has a slot, so that none is left to be cleared.
extern "C" int megazero_cuda_gathered_sum_backward(std::int64_t dtype, std::int64_t count, std::int64_t width,
                                                   std::int64_t available, std::int64_t each, std::int64_t all_taken,
                                                   const void* rows, const std::int64_t* slots,
                                                   const std::int64_t* choice, const float* weights, const void* grad,
                                                   void* grad_rows, float* grad_weights, void* stream) {
  if (!slots_fit(each)) return 1;
  const RowLaunch sums = row_launch(count, width), unused = row_launch(available, width);
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((gathered_sum_backward<T, pack(), whole()>), sums.blocks, sums.threads, 0, stream, count,
                             width, (Slots{available, static_cast<int>(each), slots, weights}),
                             static_cast<const T*>(rows), static_cast<const T*>(grad), static_cast<T*>(grad_rows),
                             grad_weights);
    };
    const auto clear = [&](auto pack, auto) {
      return MEGAZERO_LAUNCH((gathered_sum_clear<T, pack()>), unused.blocks, unused.threads, 0, stream, available,
                             width, choice, static_cast<T*>(grad_rows));
    };
    const bool any = count > 0 && each > 0, left = all_taken == 0 && available > 0 && width > 0;
    const int code = any ? with_row_shape<T>(sums, width, start, rows, grad, grad_rows) : 0;
    return code != 0 || !left ? code : with_row_shape<T>(unused, width, clear, grad_rows);
  });
}
MEGAZERO_EXPORT(gathered_sum_backward)
