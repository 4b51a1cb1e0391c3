// Sums over groups of threads, completed by the blocks that have made the summands: the block that comes last to a
// counter adds up what eight blocks have left, the last of eight such blocks goes on, and so to the top. Which block is
// last does not matter: summands have their places, and are added in the order of these. Each step reads little, and
// no second kernel is started.
#pragma once

#include "common/cuda_columns.hpp"

namespace megazero {

constexpr int kBranch = 8;

// The counters that so many blocks need. They are 0 before, and again afterwards.
__device__ __host__ __forceinline__ std::int64_t counters_of(std::int64_t blocks) {
  std::int64_t counters = 0;
  do {
    blocks = (blocks + kBranch - 1) / kBranch;
    counters += blocks;
  } while (blocks > 1);
  return counters;
}

// A forward pass clears the counters of its backward.
__device__ __forceinline__ void clear_counters(Global<int> counters, int count) {
  if (!counters || blockIdx.x != 0 || blockIdx.y != 0) return;
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += threads) counters[i] = 0;
}

// Whether this block is the last of so many that come to the counter; it then sees what the others have written. All
// threads of a block must call it.
__device__ __forceinline__ bool last_of(Global<int> counter, int blocks) {
  MEGAZERO_SHARED(int, last, 1);
  __syncthreads();  // all threads have written
  if (blocks == 1) return true;
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    __threadfence();
    const bool is_last = atomicAdd(counter, 1) == blocks - 1;
    if (is_last) atomicAdd(counter, -blocks);
    last[0] = is_last;
    __threadfence();
  }
  __syncthreads();
  return last[0] != 0;
}

// Adds up the columns from `first` to `end` of partials, fp32 [rows, width], which it overwrites; the sums are rounded
// to P. `blocks` blocks have written them, this one as the `place`th, each `rows_of_block` rows or what is left of them.
// All threads of the blocks must call it. N: the columns that a thread takes at once; it divides all others.
template <int N, typename P>
__device__ __forceinline__ void add_up(Global<float> partials, int rows, int width, int first, int end, int place,
                                       int blocks, int rows_of_block, Global<int> counters, Global<P> out) {
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  int step = 1, reach = rows_of_block;  // from a summand to the next, and the rows that a place stands for
  while (true) {
    place /= kBranch;
    const int left = blocks - place * kBranch, here = left < kBranch ? left : kBranch;
    if (!last_of(counters + place, here)) return;
    const int begin = place * kBranch * reach;
    const int lowest = rows - begin < here * reach ? rows - begin : here * reach, summands = step == 1 ? lowest : here;
    blocks = (blocks + kBranch - 1) / kBranch;
#pragma unroll 1
    for (int column = first + static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) * N; column < end;
         column += threads * N) {
      const auto top = partials + std::int64_t{begin} * width + column;
      auto at = top;
      Pack<float, N> sum = {};
#pragma unroll 4
      for (int i = 0; i < summands; ++i, at = at + std::int64_t{step} * width) {
        const auto more = load_pack<N>(at, 0);
#pragma unroll
        for (int n = 0; n < N; ++n) sum.at[n] += more.at[n];
      }
      if (blocks > 1) {
        store_pack<N>(top, 0, sum);
        continue;
      }
      Pack<P, N> rounded;
#pragma unroll
      for (int n = 0; n < N; ++n) rounded.at[n] = from_float<P>(sum.at[n]);
      store_pack<N>(out, column, rounded);
    }
    if (blocks == 1) return;
    counters = counters + blocks;
    step = reach *= kBranch;
  }
}

// The same where blocks have rows of `length` columns whole, each of their groups of threads one of partial sums.
template <int N, typename P>
__device__ __forceinline__ void add_up_groups(Global<float> partials, int length, Global<int> counters, Global<P> out) {
  constexpr int kAtOnce = N == 1 ? 1 : 4;
  const int blocks = static_cast<int>(gridDim.x), rows = static_cast<int>(blockDim.y);
  add_up<kAtOnce>(partials, blocks * rows, length, 0, length, static_cast<int>(blockIdx.x), blocks, rows, counters, out);
}

// The same where blocks have some columns of rows, N to a thread.
template <int N, typename P>
__device__ __forceinline__ void add_up_columns(Global<float> partials, int rows, int width, Global<int> counters,
                                               Global<P> out) {
  constexpr int kAtOnce = N == 1 ? 1 : 4;
  const int down = static_cast<int>(gridDim.y), tile = static_cast<int>(blockDim.x) * N;
  const int first = static_cast<int>(blockIdx.x) * tile, end = first + tile < width ? first + tile : width;
  add_up<kAtOnce>(partials, rows, width, first, end, static_cast<int>(blockIdx.y), down, static_cast<int>(blockDim.y),
                  counters + blockIdx.x * counters_of(down), out);
}

}  // namespace megazero
