// Tiles of rows in shared memory, and products of them by tensor cores: what the kernels of attention are made of.
//
// A warp has 16 rows of its own, and multiplies them with tiles that its block shares. Products are of 16 bits with sums
// in fp32 (mma.sync m16n8k16); a number of fp32 is cut into three of bf16 that sum to it exactly, and its products are
// the six that matter. A lane holds, of a product's 16 rows and 8 columns, rows quad() and quad() + 8, columns 2 pair()
// and 2 pair() + 1.
#pragma once

#include "common/cuda.hpp"

namespace megazero::attention {

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / kWarp); }
__device__ __forceinline__ int quad() { return lane() / 4; }
__device__ __forceinline__ int pair() { return lane() % 4; }

// The sizes of a block's tiles of D channels. A row has 16 bytes more than it needs, so that neither eight rows at one
// column nor eight neighbors in a row meet in a bank.
template <typename T, int D>
struct Shape {
  static constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  static constexpr int kStride = D + kPack;
  static constexpr int kWarps = sizeof(T) == 2 ? 4 : 2;
  static constexpr int kOwn = 16 * kWarps;                              // rows that belong to one block
  static constexpr int kOther = sizeof(T) == 4 ? 16 : D == 128 ? 32 : 64;  // rows of a tile that goes by
  static constexpr int kColumns = kOther / 8;
};

// The parts that a number is cut into.
template <typename T>
constexpr int kParts = sizeof(T) == 4 ? 3 : 1;

template <typename T>
struct Left {  // 16 rows and 16 columns
  unsigned word[kParts<T>][4];
};

template <typename T>
struct Right {  // 16 rows and 8 columns
  unsigned word[kParts<T>][2];
};

// Two numbers beside each other, as one word for each part.
template <typename T, int WORDS>
__device__ __forceinline__ void set_pair(unsigned (&word)[kParts<T>][WORDS], int at, float low, float high) {
  if constexpr (sizeof(T) == 2) {
    word[0][at] = from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
  } else {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const unsigned a = __float_as_uint(low) & 0xffff0000u, b = __float_as_uint(high) & 0xffff0000u;
      word[part][at] = a >> 16 | b;
      low = low == __uint_as_float(a) ? 0.0f : low - __uint_as_float(a);
      high = high == __uint_as_float(b) ? 0.0f : high - __uint_as_float(b);
    }
  }
}

// sums += left right.
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const Left<T>& left, const Right<T>& right) {
  if constexpr (sizeof(T) == 2) {
    warp_product<T>(sums, left.word[0], right.word[0]);
  } else {
#pragma unroll
    for (int small = 2; small >= 0; --small) {
#pragma unroll
      for (int part = 0; part <= small; ++part) warp_product<Bf16>(sums, left.word[part], right.word[small - part]);
    }
  }
}

// Whether the device's instruction for it loads what a product takes; without, each lane reads its own numbers.
#if defined(__CUDACC__)
template <typename T>
constexpr bool kByMatrices = sizeof(T) == 2;
#else
template <typename T>
constexpr bool kByMatrices = false;
#endif

// Four 8 x 8 matrices of 16 bits, whose rows are where the lanes say, eight lanes for each.
template <bool turned, typename T>
__device__ __forceinline__ void load_matrices(const T* row, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
#if defined(__CUDACC__)
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (turned) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(at)
                 : "memory");
  }
#endif
}

// Numbers `at` and `apart` further, of a tile, as a pair.
template <typename T, int WORDS>
__device__ __forceinline__ void load_pair(unsigned (&word)[kParts<T>][WORDS], int i, const SharedArray<T>& tile, int at,
                                          int apart) {
  const T low = tile[at];
  const T high = tile[at + apart];
  set_pair<T>(word, i, to_float(low), to_float(high));
}

// The columns of a 16-wide step that a lane holds: two pairs of neighbors. Of fp32 it takes others, the same on both
// sides of the product, so that no bank is asked twice.
template <typename T>
__device__ __forceinline__ int first_column() { return sizeof(T) == 2 ? 2 * pair() : pair(); }
template <typename T>
constexpr int kApart = sizeof(T) == 2 ? 1 : 4;

// Rows [row, row + 16) and columns [column, column + 16) of a tile.
template <int STRIDE, typename T>
__device__ __forceinline__ Left<T> left_of(const SharedArray<T>& tile, int row, int column) {
  Left<T> left;
  if constexpr (kByMatrices<T>) {
    load_matrices<false>(&tile[(row + lane() % 16) * STRIDE + column + lane() / 16 * 8], left.word[0][0],
                         left.word[0][1], left.word[0][2], left.word[0][3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (row + quad() + i % 2 * 8) * STRIDE + column + first_column<T>() + i / 2 * 8;
      load_pair<T>(left.word, i, tile, at, kApart<T>);
    }
  }
  return left;
}

// Rows [row, row + 16) of a tile as 16 columns of a right factor, of which [column, column + 16) are the rows.
template <int STRIDE, typename T>
__device__ __forceinline__ void rows_as_columns(Right<T> (&right)[2], const SharedArray<T>& tile, int row, int column) {
  if constexpr (kByMatrices<T>) {
    load_matrices<false>(&tile[(row + lane() % 8 + lane() / 16 * 8) * STRIDE + column + lane() / 8 % 2 * 8],
                         right[0].word[0][0], right[0].word[0][1], right[1].word[0][0], right[1].word[0][1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (row + quad() + i / 2 * 8) * STRIDE + column + first_column<T>() + i % 2 * 8;
      load_pair<T>(right[i / 2].word, i % 2, tile, at, kApart<T>);
    }
  }
}

// Rows [row, row + 16) and columns [column, column + 16) of a tile as they are.
template <int STRIDE, typename T>
__device__ __forceinline__ void rows_as_rows(Right<T> (&right)[2], const SharedArray<T>& tile, int row, int column) {
  if constexpr (kByMatrices<T>) {
    load_matrices<true>(&tile[(row + lane() % 16) * STRIDE + column + lane() / 16 * 8], right[0].word[0][0],
                        right[0].word[0][1], right[1].word[0][0], right[1].word[0][1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (row + 2 * pair() + i % 2 * 8) * STRIDE + column + quad() + i / 2 * 8;
      load_pair<T>(right[i / 2].word, i % 2, tile, at, STRIDE);
    }
  }
}

// sums[16, COLUMNS 8] = rows `row` to `row + 16` of `own`, times the transpose of the tile `other`.
template <typename T, int D, int COLUMNS>
__device__ __forceinline__ void multiply_rows(float (&sums)[COLUMNS][4], const SharedArray<T>& own, int row,
                                              const SharedArray<T>& other) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
  }
#pragma unroll(sizeof(T) == 2 ? D / 16 : 1)
  for (int column = 0; column < D; column += 16) {
    const Left<T> left = left_of<Shape<T, D>::kStride>(own, row, column);
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 2) {
      Right<T> right[2];
      rows_as_columns<Shape<T, D>::kStride>(right, other, j * 8, column);
      multiply(sums[j], left, right[0]);
      multiply(sums[j + 1], left, right[1]);
    }
  }
}

// sums[16, D] += weights[16, COLUMNS 8], rounded to T, times the tile `other`. Of fp32, channels from `size` on are left
// out; a branch for each step also keeps the compiler from loading all steps at once, for which registers do not suffice.
template <typename T, int D, int COLUMNS>
__device__ __forceinline__ void add_weighted(float (&sums)[D / 8][4], const float (&weights)[COLUMNS][4],
                                             const SharedArray<T>& other, int size) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j += 2) {
    Left<T> left;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&from)[4] = weights[j + i / 2];
      set_pair<T>(left.word, i, from[i % 2 * 2], from[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int c = 0; c < D / 8; c += 2) {
      if (sizeof(T) == 4 && c * 8 >= size) continue;
      Right<T> right[2];
      rows_as_rows<Shape<T, D>::kStride>(right, other, j * 8, c * 8);
      multiply(sums[c], left, right[0]);
      multiply(sums[c + 1], left, right[1]);
    }
  }
}

// One head's rows of a tensor [rows, samples, heads, size], `row` elements apart.
template <typename T>
struct HeadRows {
  Global<T> at;
  int row;

  __device__ __forceinline__ Global<T> of(int number) const { return at + static_cast<std::int64_t>(number) * row; }
};

template <typename T, int D>
__device__ __forceinline__ SharedArray<Pack<T, Shape<T, D>::kPack>> in_packs(const SharedArray<T>& tile) {
  return SharedArray<Pack<T, Shape<T, D>::kPack>>(tile.get());
}

// A warp begins to copy eight rows from `first` on into a tile, zeros from row `end` and channel `size` on. A warp's packs
// fill whole sectors of eight rows.
template <typename T, int D>
__device__ __forceinline__ void copy_rows(const SharedArray<T>& tile, int into, const HeadRows<const T>& from, int first,
                                          int end, int size) {
  constexpr int kPack = Shape<T, D>::kPack;
  const int row = lane() % 8;
  const bool real = first + row < end;
  const auto of_row = from.of(real ? first + row : 0);
#pragma unroll(sizeof(T) == 2 ? 4 : 1)
  for (int c = lane() / 8; c < D / kPack; c += 4) {
    begin_copy(tile, (into + row) * Shape<T, D>::kStride + c * kPack, of_row + c * kPack, real && c * kPack < size);
  }
}

// A head's rows of a result, in T, or in fp32 if there is a place for it.
template <typename T>
struct WrittenRows {
  HeadRows<T> narrow;
  HeadRows<float> wide;
};

// A warp's sums [16, D] times `factor` go through rows of a tile, which nobody else uses, to
// rows from `first` on, of which those before `end` are there. In fp32 they go from where they are, whole sectors too.
template <typename T, int D>
__device__ __forceinline__ void store_rows(const float (&sums)[D / 8][4], float factor,
                                           const SharedArray<T>& tile, int into, const WrittenRows<T>& to, int first,
                                           int end, int size) {
  constexpr int kPack = Shape<T, D>::kPack, kStride = Shape<T, D>::kStride;
  if (to.wide.at) {
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + quad() + half * 8;
        if (row >= end || c * 8 >= size) continue;
        const Pack<float, 2> two{{sums[c][half * 2] * factor, sums[c][half * 2 + 1] * factor}};
        store_pack<2>(to.wide.of(row), c * 8 + 2 * pair(), two);
      }
    }
    return;
  }
  const SharedArray<Pack<T, 2>> pairs(tile.get());
  __syncwarp();
#pragma unroll
  for (int c = 0; c < D / 8; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&from)[4] = sums[c];
      const Pack<T, 2> two{{from_float<T>(from[half * 2] * factor), from_float<T>(from[half * 2 + 1] * factor)}};
      pairs[((into + quad() + half * 8) * kStride + c * 8) / 2 + pair()] = two;
    }
  }
  __syncwarp();
  const auto packs = in_packs<T, D>(tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane() % 8;
#pragma unroll
    for (int c = lane() / 8; c < D / kPack; c += 4) {
      const Pack<T, kPack> pack = packs[(into + row) * (kStride / kPack) + c];
      if (first + row < end && c * kPack < size) {
        store_pack<kPack>(to.narrow.of(first + row), c * kPack, pack);
      }
    }
  }
}

}  // namespace megazero::attention
