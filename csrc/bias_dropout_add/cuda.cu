// residual + dropout(x + bias) over rows (Srivastava et al. 2014, inverted scaling). bias: fp32 [width] or none.
// What is dropped follows from the rows' keys and positions (RowKeys). The mask is made again in backward, so nothing is
// stored for it. x and its gradient have T, the residual and the result have R: T or float.
//
// factor: 1 / (1 - p). groups: how many groups of threads take turns with the rows; a thread keeps its columns, so it
// hashes their indices once. sums: the sum of grad_x over rows, fp32 [width] or of x's type, which is the gradient of the
// bias or of one that x holds already; or null. partials: fp32 [groups, width], scratch. counters: of backward's sums,
// which forward clears.
#include "common/cuda_keep.hpp"
#include "common/cuda_sums.hpp"

namespace megazero {

// A thread's columns of one tile: their shares of the hash.
template <typename Row>
struct TileColumns {
  std::uint32_t value[Row::kPacks][Row::kElements / Row::kPacks];

  __device__ __forceinline__ void hash(int tile) {
    Row::each([&](int k, int n) { value[k][n] = keep_column(Row::at(tile, k) + n); });
  }
};

// tile *= factor where kept, 0 elsewhere, as a product, so that infinity times 0 is NaN as in the reference.
template <typename Row>
__device__ __forceinline__ void drop(Row& tile, const TileColumns<Row>& columns, const KeepRow& keep,
                                     std::int32_t threshold, float factor) {
  Row::each([&](int k, int n) { tile.value[k][n] *= keep.keeps(columns.value[k][n], threshold) ? factor : 0.0f; });
}

template <typename T, typename R, int N, bool whole>
__global__ void __launch_bounds__(1024)
    bias_dropout_add_forward(std::int64_t count, int width, Global<const T> x, Cached<float> bias,
                             Global<const R> residual, RowKeys row_keys, std::int32_t threshold, float factor,
                             Global<R> out, Global<int> counters, int counted) {
  using Row = Tile<N, whole>;
  clear_counters(counters, counted);
  const int tiles = Row::count(width);
  Row tile, added, biases;
  TileColumns<Row> columns;
  const auto prepare = [&](int t) {
    if (bias) biases.load(bias, width, t);
    if (row_keys.keys) columns.hash(t);
  };
  if (whole) prepare(0);
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const KeepRow keep = row_keys.of(row);
    for (int t = 0; t < tiles; ++t) {
      if (!whole) prepare(t);
      added.load(residual + row * width, width, t);
      tile.load(x + row * width, width, t);
      if (bias) Row::each([&](int k, int n) { tile.value[k][n] += biases.value[k][n]; });
      if (row_keys.keys) drop(tile, columns, keep, threshold, factor);
      Row::each([&](int k, int n) { tile.value[k][n] += added.value[k][n]; });
      tile.store(out + row * width, width, t);
    }
  }
}

// grad_x = mask * factor * grad, or none is written where it would be grad; partials: its sums over each group's rows.
// One block that must fit: without that hint ptxas spills.
template <typename T, typename R, typename P, int N, bool whole>
__global__ void __launch_bounds__(1024, 1)
    bias_dropout_add_backward(std::int64_t count, int width, Global<const R> grad, RowKeys row_keys,
                              std::int32_t threshold, float factor, Global<T> grad_x, Global<float> partials,
                              Global<int> counters, Global<P> sums) {
  using Row = Tile<N, whole>;
  const int tiles = Row::count(width);
  const auto own = [&] { return partials + first_row() * width; };  // asked for, not kept: registers are few
  Row tile, summed;
  TileColumns<Row> columns;
  Row::each([&](int k, int n) { summed.value[k][n] = 0.0f; });
  if (whole && row_keys.keys) columns.hash(0);
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const KeepRow keep = row_keys.of(row);
    for (int t = 0; t < tiles; ++t) {
      if (!whole && row_keys.keys) columns.hash(t);
      tile.load(grad + row * width, width, t);
      if (row_keys.keys) drop(tile, columns, keep, threshold, factor);
      if (grad_x) tile.store(grad_x + row * width, width, t);
      if (whole) {
        Row::each([&](int k, int n) { summed.value[k][n] += tile.value[k][n]; });
      } else if (partials) {
        if (row != first_row()) {
          summed.load(own(), width, t);
          Row::each([&](int k, int n) { tile.value[k][n] += summed.value[k][n]; });
        }
        tile.store(own(), width, t);
      }
    }
  }
  if (partials && (whole || first_row() >= count)) {
    if (!whole) Row::each([&](int k, int n) { summed.value[k][n] = 0.0f; });
    for (int t = 0; t < tiles; ++t) summed.store(own(), width, t);
  }
  if (partials) add_up_groups<N>(partials, width, counters, sums);
}

// Numbers about the rows: sequences, whether keys and positions are those of single rows, the first position and the
// step to the next, whether keys are a place's already, and its mixed constant.
enum RowNumber { kSequences, kKeyOfRow, kPositionOfRow, kFirst, kStep, kHasSite, kSite };

inline RowKeys row_keys(const std::int64_t* keys, const std::int64_t* positions, const std::int64_t* numbers) {
  return {keys,
          positions,
          numbers[kFirst],
          numbers[kStep],
          static_cast<std::uint64_t>(numbers[kSite]),
          static_cast<std::uint32_t>(numbers[kSequences]),
          numbers[kKeyOfRow] != 0,
          numbers[kPositionOfRow] != 0,
          numbers[kHasSite] != 0};
}

constexpr std::int64_t kMostRows = 4294967295;

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_bias_dropout_add_forward(std::int64_t dtype, std::int64_t residual_dtype,
                                                      std::int64_t count, std::int64_t width, std::int64_t groups,
                                                      const void* x, const float* bias, const void* residual,
                                                      const std::int64_t* keys, const std::int64_t* positions,
                                                      const std::int64_t* numbers, std::int64_t threshold,
                                                      double factor, void* out, std::int64_t counted, int* counters,
                                                      void* stream) {
  if (count == 0 || width == 0) return 0;
  if (count > kMostRows) return kInvalidValue;
  const RowLaunch launch = row_launch(count, width, groups);
  return with_elements(dtype, residual_dtype, [&](auto element, auto residual_element) {
    using T = decltype(element);
    using R = decltype(residual_element);
    const auto start = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((bias_dropout_add_forward<T, R, pack(), whole()>), launch.blocks, launch.threads, 0,
                             stream, count, width, static_cast<const T*>(x), bias, static_cast<const R*>(residual),
                             row_keys(keys, positions, numbers), threshold, factor, static_cast<R*>(out), counters,
                             counted);
    };
    return with_row_shape<T>(launch, width, start, x, bias, residual, out);
  });
}
MEGAZERO_EXPORT(bias_dropout_add_forward)

extern "C" int megazero_cuda_bias_dropout_add_backward(std::int64_t dtype, std::int64_t residual_dtype,
                                                       std::int64_t count, std::int64_t width, std::int64_t groups,
                                                       const void* grad, const std::int64_t* keys,
                                                       const std::int64_t* positions, const std::int64_t* numbers,
                                                       std::int64_t threshold, double factor, void* grad_x,
                                                       std::int64_t sums_dtype, void* sums, float* partials,
                                                       int* counters, void* stream) {
  if (width == 0 || (grad_x == nullptr && sums == nullptr)) return 0;
  if (count > kMostRows) return kInvalidValue;
  const RowLaunch launch = row_launch(count, width, groups);
  return with_elements(dtype, residual_dtype, [&](auto element, auto residual_element) {
    using T = decltype(element);
    using R = decltype(residual_element);
    const auto body = [&](auto sum_element) {
      using P = decltype(sum_element);
      const auto start = [&](auto pack, auto whole) {
        return MEGAZERO_LAUNCH((bias_dropout_add_backward<T, R, P, pack(), whole()>), launch.blocks, launch.threads, 0,
                               stream, count, width, static_cast<const R*>(grad), row_keys(keys, positions, numbers),
                               threshold, factor, static_cast<T*>(grad_x), partials, counters, static_cast<P*>(sums));
      };
      return with_row_shape<T>(launch, width, start, grad, grad_x, partials, sums);
    };
    return sums_dtype == dtype ? body(element) : sums_dtype == 0 ? body(float{}) : kInvalidValue;
  });
}
MEGAZERO_EXPORT(bias_dropout_add_backward)
