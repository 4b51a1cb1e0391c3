#include "permute/cpu.hpp"

#include <cstring>

#include "common/clones.hpp"

namespace megazero {
namespace {

struct Places {
  std::int64_t available;
  std::int64_t each;
  const std::int64_t* slots;

  MEGAZERO_INLINE bool holds(std::int64_t at) const { return slots[at] >= 0 && slots[at] < available; }
};

// Token by token, so that each is read from memory once; two of its rows are written at a time, which is faster than a
// memcpy for each.
template <typename T>
MEGAZERO_CLONES void copy_tokens(const T* x, Places places, T* out, std::int64_t begin, std::int64_t end,
                                 std::int64_t width) {
  for (std::int64_t i = begin; i < end; ++i) {
    const T* from = x + i * width;
    std::int64_t at = i * places.each;
    const std::int64_t last = at + places.each;
    while (at < last) {
      if (!places.holds(at)) {
        ++at;
        continue;
      }
      T* to = out + places.slots[at] * width;
      if (at + 1 < last && places.holds(at + 1)) {
        T* other = out + places.slots[at + 1] * width;
#pragma omp simd
        for (std::int64_t c = 0; c < width; ++c) {
          const T value = from[c];
          to[c] = value;
          other[c] = value;
        }
        at += 2;
      } else {
#pragma omp simd
        for (std::int64_t c = 0; c < width; ++c) to[c] = from[c];
        ++at;
      }
    }
  }
}

// For elements as wide as T.
template <typename T>
void permute(Rows shape, Places places, const T* x, const std::int64_t* choice, T* out) {
  const std::int64_t width = shape.width;
  const int copying = workers_for(shape.count, width * places.each, shape.threads);
  parallel_for(shape.count, copying, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    copy_tokens(x, places, out, begin, end, width);
  });
  if (choice == nullptr) return;
  const int clearing = workers_for(places.available, width, shape.threads);
  parallel_for(places.available, clearing, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (choice[row] < 0) std::memset(out + row * width, 0, static_cast<std::size_t>(width) * sizeof(T));
    }
  });
}

}  // namespace
}  // namespace megazero

void megazero_permute(megazero::Rows shape, std::int64_t available, std::int64_t each, const void* x,
                      const std::int64_t* slots, const std::int64_t* choice, void* out) {
  const megazero::Places places{available, each, slots};
  const auto run = [&](auto element) {
    using T = decltype(element);
    megazero::permute(shape, places, static_cast<const T*>(x), choice, static_cast<T*>(out));
  };
  if (shape.narrow) {
    run(std::uint16_t{});
  } else {
    run(std::uint32_t{});
  }
}
