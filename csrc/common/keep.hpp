// Dropout's masks as megazero/ops/counter_random/keep.py makes them, bit for bit.
#pragma once

#include <cstdint>

#include "common/clones.hpp"

namespace megazero {

// One row's share of the hash; an element whose hash is not below `threshold` is kept, and multiplied by `kept`.
struct KeepRow {
  std::uint32_t low, odd_high;
  const std::int32_t* columns;  // the columns' shares
  std::int32_t threshold;
  float kept;

  // `kept` or 0 for an element.
  MEGAZERO_INLINE float operator()(std::int64_t column) const {
    std::uint32_t x = (low + static_cast<std::uint32_t>(columns[column])) * odd_high;
    x = (x ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(x) >> 16)) * 0x7FEB352Du;
    return static_cast<std::int32_t>(x) >= threshold ? kept : 0.0f;
  }
};

// The shares of all rows and columns.
struct Keep {
  const std::int32_t *low, *odd_high, *columns;
  std::int32_t threshold;
  float kept;

  MEGAZERO_INLINE KeepRow row(std::int64_t number) const {
    return {static_cast<std::uint32_t>(low[number]), static_cast<std::uint32_t>(odd_high[number]), columns, threshold,
            kept};
  }
};

}  // namespace megazero
