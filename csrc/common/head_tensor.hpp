// Queries, keys or values as kernels see them, which need not be contiguous.
#pragma once

#include <cstdint>

namespace megazero {

// [rows, samples, heads, size] somewhere in memory, with the distances of neighbors; those of `size` are adjacent.
struct HeadTensor {
  void* at;
  std::int64_t row, sample, head;
};

}  // namespace megazero
