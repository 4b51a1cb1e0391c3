// Small matrix products in fp32 whose operands are in the caches: c (+)= a b, tile by tile in registers.
#pragma once

#include <cstdint>

#include "common/clones.hpp"

namespace megazero {

// A vector of floats anywhere in memory; structs, as templates drop attributes of their arguments.
struct Floats4 {
  using Vector = float __attribute__((vector_size(16), aligned(4), may_alias));
};
struct Floats8 {
  using Vector = float __attribute__((vector_size(32), aligned(4), may_alias));
};
struct Floats16 {
  using Vector = float __attribute__((vector_size(64), aligned(4), may_alias));
};

// The tile of one instruction set: Rows x Vectors vectors of sums, and what they are made from, fit its registers: 16
// of 16 bytes, 16 of 32, 32 of 64.
template <typename Floats, int Rows, int Vectors>
struct Tile {
  using Vector = typename Floats::Vector;
  static constexpr int width = sizeof(Vector) / sizeof(float);
  static constexpr int rows = Rows;
  static constexpr int vectors = Vectors;
};

using BaselineTile = Tile<Floats4, 4, 2>;
using Avx2Tile = Tile<Floats8, 4, 2>;
using Avx512Tile = Tile<Floats16, 8, 2>;

// What sizes must be multiples of, for any tile.
constexpr std::int64_t kTileRows = 8;
constexpr std::int64_t kTileColumns = 16;

// Columns are stored in panels: column j of b is at (j / 16) panel + j % 16 of each row.
constexpr std::int64_t kPanel = kTileColumns;

struct Left {
  const float* at;
  std::int64_t row;
  std::int64_t column;  // the distance of neighbors in a row: a transposed matrix has row 1
};

struct Right {
  const float* at;
  std::int64_t row;
  std::int64_t panel;
};

template <typename Set, int Vectors, bool Add>
MEGAZERO_INLINE void tile_product(Left a, Right b, float* c, std::int64_t c_row, std::int64_t depth) {
  using Vector = typename Set::Vector;
  Vector sums[Set::rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Set::rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      if constexpr (Add) {
        sums[i][j] = *reinterpret_cast<const Vector*>(c + i * c_row + j * Set::width);
      } else {
        sums[i][j] = Vector{};
      }
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    Vector right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      right[j] = *reinterpret_cast<const Vector*>(b.at + j * Set::width / kPanel * b.panel + j * Set::width % kPanel);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Set::rows; ++i) {
      const float left = a.at[i * a.row];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sums[i][j] += left * right[j];
    }
    a.at += a.column;
    b.at += b.row;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Set::rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) *reinterpret_cast<Vector*>(c + i * c_row + j * Set::width) = sums[i][j];
  }
}

// c [rows, columns] = a [rows, depth] b [depth, columns], or added to it; rows and columns are multiples of
// kTileRows and kTileColumns. Every sum runs over `depth` in order, so it does not depend on its neighbors.
template <typename Set, bool Add>
MEGAZERO_INLINE void product(std::int64_t rows, std::int64_t columns, std::int64_t depth, Left a, Right b, float* c,
                             std::int64_t c_row) {
  constexpr std::int64_t step = Set::width * Set::vectors;
  for (std::int64_t j = 0; j < columns;) {
    const Right from{b.at + j / kPanel * b.panel + j % kPanel, b.row, b.panel};
    if (columns - j >= step) {
      for (std::int64_t i = 0; i < rows; i += Set::rows) {
        tile_product<Set, Set::vectors, Add>({a.at + i * a.row, a.row, a.column}, from, c + i * c_row + j, c_row, depth);
      }
      j += step;
    } else {
      for (std::int64_t i = 0; i < rows; i += Set::rows) {
        tile_product<Set, 1, Add>({a.at + i * a.row, a.row, a.column}, from, c + i * c_row + j, c_row, depth);
      }
      j += Set::width;
    }
  }
}

}  // namespace megazero
