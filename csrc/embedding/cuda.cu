// Rows of a table by token id, the table sliced over tensor-parallel ranks by rows (Shoeybi et al. 2019), and the
// table's gradient: for each row, the sum of the gradients of its tokens, in the tokens' order and in fp32.
//
// weight, grad_weight: [rows, width], rows `first` .. `first + rows` of the whole table; tokens: int64 [count]; out and
// grad: [count, width]. For backward, the tokens are sorted, equal ones in order: sorted: int64 [count], the row of
// each, or `rows` if it is none of these; order: int64 [count], their numbers; starts: int64 [rows + 1], where each
// row's begin. partials: fp32 [count / segment, width], scratch. The cost of a frequent token is divided: a segment of
// that many sorted tokens is added up by itself if all of them are of one row.
#include "common/cuda_copies.hpp"
#include "common/cuda_rows.hpp"

namespace megazero {

struct TableSlice {
  std::int64_t first, rows, vocab_size;
};

template <typename T, int N>
__global__ void __launch_bounds__(kCopyThreads)
    embedding_forward(CopiedRows<T, N> rows, TableSlice slice, Cached<std::int64_t> tokens) {
  copy_rows(rows, [&](std::int64_t i) {
    const std::int64_t token = tokens[i], row = token - slice.first;
    if (token < 0 || token >= slice.vocab_size) return kNowhere;
    return row >= 0 && row < slice.rows ? row : kZeros;
  });
}

// sum += each of rows[number(i)] for begin <= i < end.
template <typename Row, typename Rows, typename Number>
__device__ __forceinline__ void add_rows(Row& sum, Rows rows, std::int64_t begin, std::int64_t end, int width, int tile,
                                         const Number& number) {
  Row one;
#pragma unroll(Row::kPacks > 2 ? 1 : 2)  // loads of single elements fill the registers as it is
  for (std::int64_t i = begin; i < end; ++i) {
    one.load(rows + number(i) * width, width, tile);
    Row::each([&](int k, int n) { sum.value[k][n] += one.value[k][n]; });
  }
}

// Adds up the segments that are of one row.
template <typename T, int N, bool whole>
__global__ void __launch_bounds__(1024, 1)
    embedding_segments(std::int64_t count, int width, std::int64_t rows, std::int64_t segment,
                       Cached<std::int64_t> sorted, Cached<std::int64_t> order, Global<const T> grad,
                       Global<float> partials) {
  using Row = Tile<N, whole>;
  const std::int64_t number = first_row(), begin = number * segment, end = begin + segment;
  if (end > count) return;
  const std::int64_t row = sorted[begin];
  if (row >= rows || row != sorted[end - 1]) return;
  Row sum;
  for (int t = 0; t < Row::count(width); ++t) {
    Row::each([&](int k, int n) { sum.value[k][n] = 0.0f; });
    add_rows(sum, grad, begin, end, width, t, [&](std::int64_t i) -> std::int64_t { return order[i]; });
    sum.store(partials + number * width, width, t);
  }
}

// A row's tokens are those before its first whole segment, its whole segments, and those after them.
template <typename T, int N, bool whole>
__global__ void __launch_bounds__(1024, 1)
    embedding_backward(std::int64_t rows, int width, std::int64_t segment, Cached<std::int64_t> starts,
                       Cached<std::int64_t> order, Global<const T> grad, Global<const float> partials,
                       Global<T> grad_weight) {
  using Row = Tile<N, whole>;
  const std::int64_t row = first_row();
  if (row >= rows) return;
  const std::int64_t begin = starts[row], end = starts[row + 1];
  const std::int64_t first = (begin + segment - 1) / segment, last = end / segment;
  const bool divided = first < last;
  const auto token = [&](std::int64_t i) -> std::int64_t { return order[i]; };
  Row sum;
  for (int t = 0; t < Row::count(width); ++t) {
    Row::each([&](int k, int n) { sum.value[k][n] = 0.0f; });
    add_rows(sum, grad, begin, divided ? first * segment : end, width, t, token);
    if (divided) {
      add_rows(sum, partials, first, last, width, t, [](std::int64_t i) { return i; });
      add_rows(sum, grad, last * segment, end, width, t, token);
    }
    sum.store(grad_weight + row * width, width, t);
  }
}

}  // namespace megazero

using namespace megazero;

// Tokens of other slices' rows give zeros, those outside of the vocabulary NaN.
extern "C" int megazero_cuda_embedding_forward(std::int64_t count, std::int64_t row_bytes, std::int64_t first,
                                               std::int64_t rows, std::int64_t vocab_size, const void* weight,
                                               const std::int64_t* tokens, void* out, void* stream) {
  const auto start = [&](auto element, auto pack, const auto& copied, CopyLaunch launch) {
    return MEGAZERO_LAUNCH((embedding_forward<decltype(element), pack()>), launch.blocks, launch.threads, 0, stream,
                           copied, (TableSlice{first, rows, vocab_size}), tokens);
  };
  return with_copied_rows(count, row_bytes, weight, nullptr, out, start);
}
MEGAZERO_EXPORT(embedding_forward)

extern "C" int megazero_cuda_embedding_backward(std::int64_t dtype, std::int64_t count, std::int64_t rows,
                                                std::int64_t width, std::int64_t segment,
                                                const std::int64_t* sorted, const std::int64_t* order,
                                                const std::int64_t* starts, const void* grad, float* partials,
                                                void* grad_weight, void* stream) {
  if (rows == 0 || width == 0) return 0;
  const std::int64_t segments = count / segment;
  const RowLaunch by_row = row_launch(rows, width), by_segment = row_launch(segments, width);
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto add_segments = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((embedding_segments<T, pack(), whole()>), by_segment.blocks, by_segment.threads, 0, stream,
                             count, width, rows, segment, sorted, order, static_cast<const T*>(grad), partials);
    };
    const auto add_rows = [&](auto pack, auto whole) {
      return MEGAZERO_LAUNCH((embedding_backward<T, pack(), whole()>), by_row.blocks, by_row.threads, 0, stream, rows,
                             width, segment, starts, order, static_cast<const T*>(grad), partials,
                             static_cast<T*>(grad_weight));
    };
    const int code = segments > 0 ? with_row_shape<T>(by_segment, width, add_segments, grad, partials) : 0;
    return code != 0 ? code : with_row_shape<T>(by_row, width, add_rows, grad, partials, grad_weight);
  });
}
MEGAZERO_EXPORT(embedding_backward)
