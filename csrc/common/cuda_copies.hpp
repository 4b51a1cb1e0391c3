// Rows that are copied, not computed with: gathers and scatters of tokens, embeddings.
//
// A row's elements are moved in the widest units that its length and the addresses allow: 16, 4 or 2 bytes. A thread
// takes the same columns of kRowsAtOnce rows, so that as many loads are under way at once.
#pragma once

#include <initializer_list>

#include "common/cuda.hpp"

namespace megazero {

constexpr int kCopyThreads = 256;
constexpr int kRowsAtOnce = 4;

// Where a copied row comes from, if it is not a row of the source. kNowhere is for numbers that no row has: the result
// is NaN in every float type, which tells of them without a wait and reads nothing.
constexpr std::int64_t kOtherwise = -1, kZeros = -2, kNowhere = -3;

// Units of N elements of T; a row has `units` of them.
template <typename T, int N>
struct CopiedRows {
  std::int64_t count, units;
  Global<const T> source, otherwise;
  Global<T> out;
};

// out[row] = source[from(row)], for a `from` that gives a row of the source or one of the constants above.
template <typename T, int N, typename From>
__device__ __forceinline__ void copy_rows(const CopiedRows<T, N>& rows, const From& from) {
  const std::int64_t width = rows.units * N, stride = blockDim.y;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * stride * kRowsAtOnce + threadIdx.y;
  std::int64_t number[kRowsAtOnce];
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    const std::int64_t row = first + k * stride;
    number[k] = row < rows.count ? from(row) : kZeros;
  }
  for (std::int64_t unit = threadIdx.x; unit < rows.units; unit += blockDim.x) {
    Pack<T, N> pack[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (number[k] >= 0) {
        pack[k] = load_pack<N>(rows.source + number[k] * width, unit * N);
      } else if (number[k] == kOtherwise) {
        pack[k] = load_pack<N>(rows.otherwise + (first + k * stride) * width, unit * N);
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n) pack[k].at[n] = number[k] == kNowhere ? static_cast<T>(~T{0}) : T{0};
      }
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k * stride < rows.count) store_pack<N>(rows.out + (first + k * stride) * width, unit * N, pack[k]);
    }
  }
}

struct CopyLaunch {
  dim3 blocks, threads;
};

// Blocks for that many rows of `units` units: as many threads for a row as have something to do, at most a block.
inline CopyLaunch copy_launch(std::int64_t count, std::int64_t units) {
  unsigned across = 1;
  while (across < kCopyThreads && across < units) across *= 2;
  const dim3 threads(across, kCopyThreads / across);
  return {dim3(static_cast<unsigned>(ceil_div(count, std::int64_t{threads.y} * kRowsAtOnce))), threads};
}

// Calls start(element, pack, rows, launch) with the widest units in which rows of `bytes` bytes at these addresses can
// be reached. `source` and `otherwise` may be null, if no row comes from there.
template <typename Start>
int with_copied_rows(std::int64_t count, std::int64_t bytes, const void* source, const void* otherwise, void* out,
                     const Start& start) {
  const auto fits = [&](std::int64_t unit) {
    bool all = bytes % unit == 0;
    for (const void* each : {source, otherwise, static_cast<const void*>(out)}) {
      all = all && aligned(each, static_cast<std::size_t>(unit));
    }
    return all;
  };
  const auto begin = [&](auto element, auto pack) {
    using T = decltype(element);
    const std::int64_t units = bytes / static_cast<std::int64_t>(pack() * sizeof(T));
    const CopiedRows<T, pack()> rows{count, units, static_cast<const T*>(source), static_cast<const T*>(otherwise),
                                     static_cast<T*>(out)};
    return start(element, pack, rows, copy_launch(count, units));
  };
  if (count == 0 || bytes == 0) return 0;
  if (fits(16)) return begin(std::uint32_t{}, std::integral_constant<int, 4>{});
  if (fits(4)) return begin(std::uint32_t{}, std::integral_constant<int, 1>{});
  return fits(2) ? begin(std::uint16_t{}, std::integral_constant<int, 1>{}) : 1;
}

}  // namespace megazero
