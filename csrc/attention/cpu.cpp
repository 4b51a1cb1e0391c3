#include "attention/cpu.hpp"

#include "common/clones.hpp"
#include "common/exponential.hpp"
#include "common/numbers.hpp"

namespace megazero {
namespace {

template <typename T>
MEGAZERO_CLONES void row_probabilities(T* scores, std::int64_t count, float factor) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) store(exponential(load(scores + i) * factor), scores + i);
}

}  // namespace
}  // namespace megazero

void megazero_attention_probabilities(megazero::Rows rows, std::int64_t queries, std::int64_t diagonal, float factor,
                                      void* scores) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      for (std::int64_t row = begin; row < end; ++row) {
        T* of_row = static_cast<T*>(scores) + row * rows.width;
        const std::int64_t reach = row % queries + diagonal + 1;
        const std::int64_t seen = std::clamp<std::int64_t>(reach, 0, rows.width);
        megazero::row_probabilities(of_row, seen, factor);
        std::fill(of_row + seen, of_row + rows.width, T{});
      }
    });
  });
}
