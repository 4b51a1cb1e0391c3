// The blending index: which dataset sample i of a weighted mixture comes from.
//
// At every step the dataset that lags furthest behind its share is chosen, so after any number of samples each
// count is within one or two of weight * i. Twins: `blending_index_reference` and
// `exhaustive_blending_index_reference` in megazero/data/index_build.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace megazero::data {

// limits: samples each dataset may give, or nullptr for no limit. Writes `size` entries of the two outputs.
// Ties go to the lowest dataset number. The product is kept in a variable of its own and must not be fused with the
// subtraction (-ffp-contract=off), or ties could fall differently from the reference on some machines.
inline void build_blending_index(const double* weights, const std::int64_t* limits, std::int64_t datasets,
                                 std::int64_t size, std::int16_t* dataset_index, std::int64_t* sample_index) {
  std::vector<std::int64_t> taken(static_cast<std::size_t>(datasets), 0);
  for (std::int64_t i = 0; i < size; ++i) {
    const double step = static_cast<double>(std::max<std::int64_t>(i, 1));
    std::int64_t chosen = -1;
    double furthest = 0.0;
    for (std::int64_t d = 0; d < datasets; ++d) {
      if (limits != nullptr && taken[d] >= limits[d]) {
        continue;
      }
      const double share = weights[d] * step;
      const double lag = share - static_cast<double>(taken[d]);
      if (chosen < 0 || lag > furthest) {
        chosen = d;
        furthest = lag;
      }
    }
    dataset_index[i] = static_cast<std::int16_t>(chosen);
    sample_index[i] = taken[chosen]++;
  }
}

}  // namespace megazero::data
