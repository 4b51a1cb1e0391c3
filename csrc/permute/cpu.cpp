#include "permute/cpu.hpp"

#include <cstring>

// Token by token, so that each is read from memory once and from the cache for its other choices.
void megazero_permute(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* x,
                      const std::int64_t* slots, const std::int64_t* choice, void* out) {
  const std::int64_t bytes = shape.width * static_cast<std::int64_t>(shape.narrow ? sizeof(std::uint16_t) : sizeof(float));
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  const int workers = megazero::workers_for(shape.count, shape.width * each, shape.threads);
  megazero::parallel_for(shape.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t at = begin * each; at < end * each; ++at) {
      if (slots[at] < 0 || slots[at] >= available) continue;
      std::memcpy(to + slots[at] * bytes, from + at / each * bytes, static_cast<std::size_t>(bytes));
    }
  });
  if (choice == nullptr) return;
  const int clearing = megazero::workers_for(available, shape.width, shape.threads);
  megazero::parallel_for(available, clearing, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (choice[row] < 0) std::memset(to + row * bytes, 0, static_cast<std::size_t>(bytes));
    }
  });
}
