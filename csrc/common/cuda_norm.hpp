// What normalizations of rows share: the residual that may be added before them, and the sums that their backward makes.
#pragma once

#include "common/cuda_sums.hpp"

namespace megazero {

// Reads a tile of the row that begins at element `from`: of x, or, if there is a residual, of x + residual. That is
// rounded to T first, so that what is normalized is what is kept, and is written to total.
template <typename Row, typename T>
__device__ __forceinline__ void load_total(Row& tile, Global<const T> x, Global<const T> residual, Global<T> total,
                                           std::int64_t from, int width, int t) {
  tile.load(x + from, width, t);
  if (!residual) return;
  Row other;
  other.load(residual + from, width, t);
  Row::each([&](int k, int n) { tile.value[k][n] = to_float(from_float<T>(tile.value[k][n] + other.value[k][n])); });
  tile.store(total + from, width, t);
}

// Adds to a tile of grad_x the gradient that arrives for the total, if any.
template <typename Row, typename T>
__device__ __forceinline__ void add_grad(Row& grad, Global<const T> grad_total, std::int64_t from, int width, int t) {
  if (!grad_total) return;
  Row other;
  other.load(grad_total + from, width, t);
  Row::each([&](int k, int n) { grad.value[k][n] += other.value[k][n]; });
}

// A thread's sums over rows: of rows that are one tile they stay in the block's dynamic shared memory, where a thread
// reads and writes its own places only; of others in the group's partial sums.
template <int N, bool whole>
struct HeldSums {
  using Row = Tile<N, whole>;

  static __device__ __forceinline__ int place(int k, int n) {
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    return (k * N + n) * threads + static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  }

  __device__ __forceinline__ void clear() const {
    if (!whole) return;
    MEGAZERO_DYNAMIC_SHARED(float, held);
    Row::each([&](int k, int n) { held[place(k, n)] = 0.0f; });
  }

  // Adds a tile of a row; `first`: it is the group's first.
  __device__ __forceinline__ void add(const Row& tile, Global<float> own, int width, int t, bool first) const {
    if (whole) {
      MEGAZERO_DYNAMIC_SHARED(float, held);
      Row::each([&](int k, int n) { held[place(k, n)] += tile.value[k][n]; });
      return;
    }
    Row sum = {};
    if (!first) sum.load(own, width, t);
    Row::each([&](int k, int n) { sum.value[k][n] += tile.value[k][n]; });
    sum.store(own, width, t);
  }

  // Writes the partial sums of a group, which are zeros for one that has no rows.
  __device__ __forceinline__ void store(Global<float> own, int width, int t) const {
    Row sum = {};
    if (whole) {
      MEGAZERO_DYNAMIC_SHARED(float, held);
      Row::each([&](int k, int n) { sum.value[k][n] = held[place(k, n)]; });
    }
    sum.store(own, width, t);
  }
};

// The shared memory of such sums, if they are wanted.
template <bool whole>
std::size_t held_bytes(const RowLaunch& launch, bool wanted) {
  return whole && wanted ? sizeof(float) * kPerThread * launch.threads.x * launch.threads.y : 0;
}

// The counters that lie behind a forward's statistics.
inline int* counters_behind(float* statistics) { return reinterpret_cast<int*>(statistics); }

}  // namespace megazero
