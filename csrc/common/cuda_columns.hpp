// Elementwise work on a matrix: a thread takes a pack of neighbouring columns and goes down the rows, so that what
// belongs to a column (a bias, the sum of its gradient) stays in registers. An array without rows is one row.
#pragma once

#include <algorithm>

#include "common/cuda_rows.hpp"

namespace megazero {

constexpr unsigned kColumnBlock = 128;

struct ColumnLaunch {
  dim3 blocks, threads;
};

// Threads for `rows` rows at once, each of which takes `pack` columns; rows_at_once() leads them to further rows. For
// one row there is one thread per pack.
inline ColumnLaunch column_launch(std::int64_t rows, std::int64_t width, int pack) {
  const std::int64_t packs = (width + pack - 1) / pack;
  unsigned across = kWarp;
  while (across < kColumnBlock && (across < packs || across * rows < kColumnBlock)) across *= 2;
  const dim3 threads(across, kColumnBlock / across);
  const std::int64_t down = std::min<std::int64_t>((rows + threads.y - 1) / threads.y, 65535);
  return {dim3(static_cast<unsigned>((packs + across - 1) / across), static_cast<unsigned>(down)), threads};
}

template <int N>
__device__ __forceinline__ std::int64_t first_column() {
  return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
}

__device__ __forceinline__ std::int64_t own_row() {
  return static_cast<std::int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
}

__device__ __forceinline__ std::int64_t rows_at_once() { return static_cast<std::int64_t>(gridDim.y) * blockDim.y; }

// A row's elements from column `first` on, N of them or as many as there are. `full` is known when compiling: there are
// N, as in rows whose width is a multiple of it, and the other case takes no registers.
template <int N, bool full = false>
struct Columns {
  float value[N];

  template <typename Pointer>
  __device__ __forceinline__ void load(Pointer row, std::int64_t width, std::int64_t first) {
    using T = MEGAZERO_ELEMENT(row);
    constexpr int kAtOnce = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
    if (full || first + N <= width) {
#pragma unroll
      for (int part = 0; part < N; part += kAtOnce) {
        const auto pack = load_pack<kAtOnce>(row, first + part);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) value[part + n] = to_float(pack.at[n]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) value[n] = first + n < width ? to_float(static_cast<T>(row[first + n])) : 0.0f;
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(Global<T> row, std::int64_t width, std::int64_t first) const {
    constexpr int kAtOnce = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
    if (full || first + N <= width) {
#pragma unroll
      for (int part = 0; part < N; part += kAtOnce) {
        Pack<T, kAtOnce> pack;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) pack.at[n] = from_float<T>(value[part + n]);
        store_pack<kAtOnce>(row, first + part, pack);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (first + n < width) row[first + n] = from_float<T>(value[n]);
      }
    }
  }

  // Calls body(n) for each element's place.
  template <typename Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int n = 0; n < N; ++n) body(n);
  }
};

// Calls start with the constant that a kernel is compiled for: the elements of a pack. An array without rows (`flat`)
// may end within one.
template <typename T, typename Start, typename... Pointers>
int with_columns(bool flat, std::int64_t width, const Start& start, Pointers... pointers) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const bool packed = packs_fit<T>(flat ? 0 : width, pointers...);
  return packed ? start(std::integral_constant<int, kPack>{}) : start(std::integral_constant<int, 1>{});
}

}  // namespace megazero
