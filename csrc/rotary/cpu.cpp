#include "rotary/cpu.hpp"

#include "common/clones.hpp"
#include "common/numbers.hpp"

namespace megazero {
namespace {

template <typename T>
MEGAZERO_CLONES void turn(const T* x, T* out, const float* cosines, const float* sines, float direction,
                          std::int64_t half, std::int64_t size) {
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const float first = load(x + i), second = load(x + half + i), sine = direction * sines[i];
    store(first * cosines[i] - second * sine, out + i);
    store(second * cosines[i] + first * sine, out + half + i);
  }
  for (std::int64_t i = 2 * half; i < size; ++i) out[i] = x[i];
}

}  // namespace
}  // namespace megazero

void megazero_rotary(megazero::Rows rows, std::int64_t samples, std::int64_t heads, std::int64_t half,
                     megazero::HeadTensor x, const float* cosines, const float* sines, std::int64_t table_row,
                     std::int64_t table_sample, float direction, megazero::HeadTensor out) {
  megazero::with_element(rows.narrow, [&](auto element) {
    using T = decltype(element);
    const int workers = megazero::workers_for(rows.count, rows.width, rows.threads);
    megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = i / samples, sample = i % samples;
        const std::int64_t angle = row * table_row + sample * table_sample;
        for (std::int64_t head = 0; head < heads; ++head) {
          megazero::turn(static_cast<const T*>(x.at) + row * x.row + sample * x.sample + head * x.head,
                         static_cast<T*>(out.at) + row * out.row + sample * out.sample + head * out.head,
                         cosines + angle, sines + angle, direction, half, rows.width / heads);
        }
      }
    });
  });
}
