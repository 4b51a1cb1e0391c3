#include "linear/cpu.hpp"

#include <algorithm>
#include <vector>

#include "common/numbers.hpp"
#include "common/parallel.hpp"
#include "common/targets.hpp"
#include "linear/rows.hpp"

namespace megazero {
namespace {

// Rows that stay in a second-level cache while all panels pass by.
constexpr std::int64_t kRows = 192;

struct Call {
  std::int64_t rows, width, depth;
  const float *x, *panels, *bias;
  float* y;
};

// All rows of one panel. The last panel's columns may be fewer than it has: its sums are made elsewhere.
template <typename Floats, int Rows>
MEGAZERO_INLINE void panel_rows(const Call& call, std::int64_t panel, float* spare) {
  const std::int64_t first = panel * kPanel, columns = std::min(kPanel, call.width - first);
  const bool whole = columns == kPanel;
  float* sums = whole ? call.y + first : spare;
  const std::int64_t row = whole ? call.width : kPanel;
  for (std::int64_t i = 0; i < call.rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) sums[i * row + j] = call.bias == nullptr ? 0.0f : call.bias[first + j];
  }
  // Blocks of like depths, as a short one costs as many loads and stores of sums as a long one.
  const std::int64_t blocks = std::max<std::int64_t>(1, (call.depth + kDepth - 1) / kDepth);
  const std::int64_t step = (call.depth + blocks - 1) / blocks;
  for (std::int64_t k = 0; k < call.depth; k += step) {
    const std::int64_t depth = std::min(step, call.depth - k);
    const float* right = call.panels + (panel * call.depth + k) * kPanel;
    add_rows<Floats, Rows>(call.rows, call.x + k, call.depth, right, depth, sums, row);
  }
  if (whole) return;
  for (std::int64_t i = 0; i < call.rows; ++i) std::copy_n(sums + i * row, columns, call.y + i * call.width + first);
}

template <typename Floats, int Rows>
MEGAZERO_INLINE void panels(const Call& call, std::int64_t begin, std::int64_t end, float* spare) {
  for (std::int64_t first = 0; first < call.rows; first += kRows) {
    Call block = call;
    block.rows = std::min(kRows, call.rows - first);
    block.x += first * call.depth;
    block.y += first * call.width;
    for (std::int64_t panel = begin; panel < end; ++panel) panel_rows<Floats, Rows>(block, panel, spare);
  }
}

void panels_baseline(const Call& call, std::int64_t begin, std::int64_t end, float* spare) {
  panels<Floats4, 2>(call, begin, end, spare);
}

MEGAZERO_AVX2 void panels_avx2(const Call& call, std::int64_t begin, std::int64_t end, float* spare) {
  panels<Floats8, 6>(call, begin, end, spare);
}

MEGAZERO_AVX512 void panels_avx512(const Call& call, std::int64_t begin, std::int64_t end, float* spare) {
  panels<Floats16, 8>(call, begin, end, spare);
}

}  // namespace
}  // namespace megazero

void megazero_pack_weight(std::int64_t width, std::int64_t depth, std::int64_t row, bool narrow, const void* weight,
                          float* panels) {
  using namespace megazero;
  with_element(narrow, [&](auto element) {
    const auto* from = static_cast<const decltype(element)*>(weight);
    for (std::int64_t first = 0; first < width; first += kPanel, panels += depth * kPanel) {
      const std::int64_t columns = std::min(kPanel, width - first);
      if (columns < kPanel) std::fill_n(panels, depth * kPanel, 0.0f);
      for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t k = 0; k < depth; ++k) panels[k * kPanel + j] = load(from + (first + j) * row + k);
      }
    }
  });
}

void megazero_ordered_linear(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t threads,
                             const float* x, const float* panels, const float* bias, float* y,
                             megazero::InstructionSet most) {
  using namespace megazero;
  const Call call{rows, width, depth, x, panels, bias, y};
  const std::int64_t count = (width + kPanel - 1) / kPanel;
  const InstructionSet set = std::min(most, instruction_set());
  const auto work = set == InstructionSet::avx512 ? &panels_avx512
                    : set == InstructionSet::avx2 ? &panels_avx2
                                                  : &panels_baseline;
  std::vector<float> spare(width % kPanel == 0 ? 0 : static_cast<std::size_t>(std::min(rows, kRows) * kPanel));
  parallel_for(count, workers_for(count, rows * depth, threads), [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    work(call, begin, end, spare.data());  // the last panel is one thread's
  });
}
