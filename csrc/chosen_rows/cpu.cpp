#include "chosen_rows/cpu.hpp"

#include <cstring>

void megazero_chosen_rows(megazero::Rows shape, const void* source, const std::int64_t* numbers, const void* otherwise,
                          void* out) {
  const std::int64_t bytes = shape.width * (shape.narrow ? 2 : 4);
  const auto* chosen = static_cast<const char*>(source);
  const auto* kept = static_cast<const char*>(otherwise);
  auto* to = static_cast<char*>(out);
  const int workers = megazero::workers_for(shape.count, shape.width, shape.threads);
  megazero::parallel_for(shape.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t i = begin; i < end; ++i) {
      const char* rows = numbers[i] >= 0 ? chosen : kept;
      const std::int64_t row = numbers[i] >= 0 ? numbers[i] : i;
      if (rows == nullptr) {
        std::memset(to + i * bytes, 0, static_cast<std::size_t>(bytes));
      } else {
        std::memcpy(to + i * bytes, rows + row * bytes, static_cast<std::size_t>(bytes));
      }
    }
  });
}
