// Work divided among the threads of the OpenMP runtime that torch has already loaded: the module is not linked to a
// runtime of its own, since two thread pools in one process would fight for the cores.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace megazero {

// How a kernel sees its tensors: contiguous rows, of bf16 if narrow, else of fp32.
struct Rows {
  std::int64_t count;
  std::int64_t width;
  std::int64_t threads;
  bool narrow;
};

// The number of elements below which a second thread costs more than it saves.
constexpr std::int64_t kGrain = 1 << 14;

// How many threads `items` of `width` elements are worth.
inline int workers_for(std::int64_t items, std::int64_t width, std::int64_t threads) {
  const std::int64_t worth = items * std::max<std::int64_t>(width, 1) / kGrain;
  return static_cast<int>(std::max<std::int64_t>(1, std::min({threads, worth, items})));
}

// Calls body(begin, end, worker) on contiguous ranges that cover [0, items), each in a thread of its own.
template <typename Body>
void parallel_for(std::int64_t items, int workers, const Body& body) {
#if defined(_OPENMP)
  if (workers > 1) {
#pragma omp parallel num_threads(workers)
    {
      // There may be fewer threads than were asked for.
      const std::int64_t team = omp_get_num_threads();
      const std::int64_t worker = omp_get_thread_num();
      body(items * worker / team, items * (worker + 1) / team, worker);
    }
    return;
  }
#endif
  (void)workers;
  body(0, items, 0);
}

}  // namespace megazero
