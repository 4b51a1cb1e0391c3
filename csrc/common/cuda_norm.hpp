// What normalizations of rows share: the residual that may be added before them.
#pragma once

#include "common/cuda_rows.hpp"

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

}  // namespace megazero
