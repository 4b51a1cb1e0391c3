// The rows that experts get of tokens (the permute of a mixture of experts): out[slots[i, j]] = x[i], and zeros in the
// rows that no slot names. x: [count, width]; slots: int64 [count, each], no two of them the same row; any other number
// stands for none; choice: int64 [available], negative for the rows without a slot; out: [available, width].
//
// By tokens, not by rows: each token is read once, however many experts it goes to. Its transpose is the sum of
// csrc/gathered_sum.
#include "common/cuda_copies.hpp"

namespace megazero {

template <typename T, int N>
__global__ void __launch_bounds__(kCopyThreads)
    permute(CopiedRows<T, N> rows, std::int64_t available, int each, Cached<std::int64_t> slots) {
  const std::int64_t width = rows.units * N, stride = blockDim.y;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * stride * kRowsAtOnce + threadIdx.y;
  for (std::int64_t unit = threadIdx.x; unit < rows.units; unit += blockDim.x) {
    Pack<T, N> pack[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const std::int64_t token = first + k * stride;
      if (token < rows.count) pack[k] = load_pack<N>(rows.source + token * width, unit * N);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const std::int64_t token = first + k * stride;
      if (token >= rows.count) continue;
      for (int j = 0; j < each; ++j) {
        const std::int64_t row = slots[token * each + j];
        if (row >= 0 && row < available) store_pack<N>(rows.out + row * width, unit * N, pack[k]);
      }
    }
  }
}

// Zeros for the rows that no token took.
template <typename T, int N>
__global__ void __launch_bounds__(kCopyThreads) permute_clear(CopiedRows<T, N> rows, Cached<std::int64_t> choice) {
  const std::int64_t width = rows.units * N, stride = blockDim.y;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * stride * kRowsAtOnce + threadIdx.y;
  Pack<T, N> zeros;
#pragma unroll
  for (int n = 0; n < N; ++n) zeros.at[n] = T{0};
  for (int k = 0; k < kRowsAtOnce; ++k) {
    const std::int64_t row = first + k * stride;
    if (row >= rows.count || choice[row] >= 0) continue;
    for (std::int64_t unit = threadIdx.x; unit < rows.units; unit += blockDim.x) {
      store_pack<N>(rows.out + row * width, unit * N, zeros);
    }
  }
}

}  // namespace megazero

using namespace megazero;

// all_taken: whether every row has a slot, so that none is left to be cleared.
extern "C" int megazero_cuda_permute(std::int64_t count, std::int64_t row_bytes, std::int64_t available,
                                     std::int64_t each, std::int64_t all_taken, const void* x,
                                     const std::int64_t* slots, const std::int64_t* choice, void* out, void* stream) {
  if (each < 0 || each > 2147483647) return 1;
  const auto copy = [&](auto element, auto pack, const auto& rows, CopyLaunch launch) {
    return MEGAZERO_LAUNCH((permute<decltype(element), pack()>), launch.blocks, launch.threads, 0, stream, rows,
                           available, static_cast<int>(each), slots);
  };
  const auto clear = [&](auto element, auto pack, const auto& rows, CopyLaunch launch) {
    return MEGAZERO_LAUNCH((permute_clear<decltype(element), pack()>), launch.blocks, launch.threads, 0, stream, rows,
                           choice);
  };
  const int code = with_copied_rows(count, row_bytes, x, nullptr, out, copy);
  return code != 0 || all_taken != 0 ? code : with_copied_rows(available, row_bytes, nullptr, nullptr, out, clear);
}
MEGAZERO_EXPORT(permute)
