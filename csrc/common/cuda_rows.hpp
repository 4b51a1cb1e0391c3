// Rows of a matrix and the threads that share one: the frame of norms, softmax and whatever else reduces over a row.
//
// A group of 1 to 32 warps takes a row. Each thread holds kPerThread elements of it in registers, so a row of up to
// 8,192 elements is read once; a wider one goes by in several tiles, and is read again where a kernel needs it twice.
// A group of one warp shares its block with three others and needs no barrier.
#pragma once

#include <algorithm>

#include "common/cuda.hpp"

namespace megazero {

constexpr int kPerThread = 8;
// How many threads add up what belongs to columns: 512 twice on every multiprocessor of an H100. A constant, so that the
// sums' order is the same on every device.
constexpr std::int64_t kColumnThreads = 264 * 1024;

struct RowLaunch {
  dim3 blocks, threads;
  bool whole;  // a row is one tile
};

// The threads that share a row of that width (x) and the rows that share a block (y).
inline dim3 row_threads(std::int64_t width) {
  unsigned warps = 1;
  while (warps < 32 && std::int64_t{warps} * kWarp * kPerThread < width) warps *= 2;
  return dim3(warps * kWarp, warps == 1 ? 4 : 1);
}

// `groups` groups that take turns with the rows; by default one for each row. It is a multiple of the rows that share a
// block, as column_groups() gives it.
inline RowLaunch row_launch(std::int64_t count, std::int64_t width, std::int64_t groups = 0) {
  const dim3 threads = row_threads(width);
  std::int64_t blocks = ((groups > 0 ? groups : count) + threads.y - 1) / threads.y;
  blocks = std::min<std::int64_t>(std::max<std::int64_t>(blocks, 1), 2147483647);
  return {dim3(static_cast<unsigned>(blocks)), threads, width <= std::int64_t{threads.x} * kPerThread};
}

// As many groups as should add up columns of `count` rows.
inline std::int64_t column_groups(std::int64_t count, std::int64_t width) {
  const dim3 threads = row_threads(width);
  const std::int64_t most = kColumnThreads / 2 / threads.x, needed = (count + threads.y - 1) / threads.y * threads.y;
  return std::max<std::int64_t>(std::min(most, needed), threads.y);
}

__device__ __forceinline__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

__device__ __forceinline__ std::int64_t row_stride() { return static_cast<std::int64_t>(gridDim.x) * blockDim.y; }

// A thread's elements of one tile of a row, in packs of N: pack k begins with element at(tile, k). `whole` is known when
// compiling: the row is one tile, and stays in registers. A row that is neither whole nor in packs takes the most
// registers for its addresses, so its tiles are half as wide.
template <int N, bool whole>
struct Tile {
  static constexpr int kElements = N == 1 && !whole ? kPerThread / 2 : kPerThread;
  static constexpr int kPacks = kElements / N;
  float value[kPacks][N];

  // How many tiles a row has.
  static __device__ __forceinline__ int count(int width) {
    const int capacity = static_cast<int>(blockDim.x) * kElements;
    return whole ? 1 : (width + capacity - 1) / capacity;
  }

  static __device__ __forceinline__ int at(int tile, int k) {
    return ((tile * kPacks + k) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }

  // How many of the thread's packs of a tile lie within the row; they come first.
  static __device__ __forceinline__ int within(int tile, int width) {
    int packs = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) packs += at(tile, k) < width;
    return packs;
  }

  // What lies beyond the row's end reads as `beyond`.
  template <typename Pointer>
  __device__ __forceinline__ void load(Pointer row, int width, int tile, float beyond = 0.0f) {
    const int packs = within(tile, width);
    load_where(row, tile, [&](int k) { return k < packs; }, beyond);
  }

  // Reads the packs k for which wanted(k), which lie within the row; the others are `otherwise`.
  template <typename Pointer, typename Wanted>
  __device__ __forceinline__ void load_where(Pointer row, int tile, const Wanted& wanted, float otherwise = 0.0f) {
    using T = MEGAZERO_ELEMENT(row);
    const int step = static_cast<int>(blockDim.x) * N;
    auto own = row + at(tile, 0);
#pragma unroll
    for (int k = 0; k < kPacks; ++k, own = own + step) {
      if (wanted(k)) {
        constexpr int kAtOnce = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
#pragma unroll
        for (int part = 0; part < N; part += kAtOnce) {
          const auto pack = load_pack<kAtOnce>(own, part);
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) value[k][part + n] = to_float(pack.at[n]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n) value[k][n] = otherwise;
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(Global<T> row, int width, int tile) const {
    const int packs = within(tile, width), step = static_cast<int>(blockDim.x) * N;
    auto own = row + at(tile, 0);
#pragma unroll
    for (int k = 0; k < kPacks; ++k, own = own + step) {
      if (k >= packs) continue;
      constexpr int kAtOnce = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
#pragma unroll
      for (int part = 0; part < N; part += kAtOnce) {
        Pack<T, kAtOnce> pack;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) pack.at[n] = from_float<T>(value[k][part + n]);
        store_pack<kAtOnce>(own, part, pack);
      }
    }
  }

  // Calls body(k, n) for each of the thread's elements, at its place in the tile.
  template <typename Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int n = 0; n < N; ++n) body(k, n);
    }
  }
};

// Sums over the threads of a row's group, in each of them. With more than one warp, the whole block must call it.
template <int COUNT>
__device__ __forceinline__ void row_sums(float (&values)[COUNT]) {
#pragma unroll
  for (int c = 0; c < COUNT; ++c) values[c] = warp_sum(values[c]);
  if (blockDim.x == kWarp) return;
  MEGAZERO_SHARED(float, partials, kWarp * COUNT);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  __syncthreads();  // the last sums have been read
  if (lane == 0) {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) partials[c * kWarp + warp] = values[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < COUNT; ++c) values[c] = warp_sum(lane < warps ? static_cast<float>(partials[c * kWarp + lane]) : 0.0f);
}

// The largest over the threads of a row's group, in each of them; NaN if any has NaN. With more than one warp, the whole
// block must call it.
__device__ __forceinline__ float row_max(float value) {
  value = warp_max(value);
  if (blockDim.x == kWarp) return value;
  MEGAZERO_SHARED(float, largest, kWarp);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  __syncthreads();  // the last maximum has been read
  if (lane == 0) largest[warp] = value;
  __syncthreads();
  return warp_max(largest[lane < warps ? lane : 0]);
}

// The widest pack, up to 16 bytes, in which rows of `width` elements at these addresses can be reached: 16 / sizeof(T)
// elements or one.
template <typename T, typename... Pointers>
bool packs_fit(std::int64_t width, Pointers... rows) {
  return width % (16 / static_cast<std::int64_t>(sizeof(T))) == 0 && (... && aligned(rows, 16));
}

// Calls start with the constants that a row kernel is compiled for: the pack's elements, and whether a row is one tile.
template <typename T, typename Start, typename... Pointers>
int with_row_shape(const RowLaunch& launch, std::int64_t width, const Start& start, Pointers... rows) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  using Wide = std::integral_constant<int, kPack>;
  using Single = std::integral_constant<int, 1>;
  if (width > 2147483647 - 8 * 1024) return 1;
  if (packs_fit<T>(width, rows...)) {
    return launch.whole ? start(Wide{}, std::true_type{}) : start(Wide{}, std::false_type{});
  }
  return launch.whole ? start(Single{}, std::true_type{}) : start(Single{}, std::false_type{});
}

}  // namespace megazero
