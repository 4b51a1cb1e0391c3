// Rows of floats times a block of one panel, every sum continued in order of depth.
#pragma once

#include "common/product.hpp"

namespace megazero {

// Depth of a block: a panel's share of it stays in a first-level cache while all rows pass by. A sum is continued from
// where the block before left it, so blocks change no bit.
constexpr std::int64_t kDepth = 512;

// Adds x [rows, depth], rows x_row apart, times panel [depth, 16] to sums, rows `row` apart: Rows rows at once.
template <typename Floats, int Rows>
MEGAZERO_INLINE void add_rows(std::int64_t rows, const float* x, std::int64_t x_row, const float* panel,
                              std::int64_t depth, float* sums, std::int64_t row) {
  constexpr int vectors = kPanel * sizeof(float) / sizeof(typename Floats::Vector);
  const Right right{panel, kPanel, 0};
  std::int64_t i = 0;
  const auto left = [&] { return Left{x + i * x_row, x_row, 1}; };
  for (; i + Rows <= rows; i += Rows) {
    tile_product<Tile<Floats, Rows, vectors>, vectors, true>(left(), right, sums + i * row, row, depth);
  }
  for (; i + 2 <= rows; i += 2) {
    tile_product<Tile<Floats, 2, vectors>, vectors, true>(left(), right, sums + i * row, row, depth);
  }
  for (; i < rows; ++i) {
    tile_product<Tile<Floats, 1, vectors>, vectors, true>(left(), right, sums + i * row, row, depth);
  }
}

}  // namespace megazero
