#include "paged_attention/cpu.hpp"

#include <algorithm>
#include <vector>

#include "attention/blocks.hpp"
#include "common/numbers.hpp"
#include "common/parallel.hpp"
#include "common/product.hpp"
#include "common/targets.hpp"

namespace megazero {
namespace {

using namespace attention;

struct Call {
  AttentionShape shape;
  AttentionLimits limits;
  std::int64_t sinks, pages;
  const std::int64_t* steps;
  const float *keys, *values;
  HeadTensor q, out;
};

// Rows of one sequence for one group of heads: row i is query first + i / sharers, head i % sharers of the group.
struct Item {
  std::int64_t row, count, place;  // the first row of the step, how many queries, the position of the first
  std::int64_t group;
  const std::int64_t* table;
};

// The items of all sequences: at most kQueries rows each, so that a long prompt is divided among the threads.
std::vector<Item> items_of(const Call& call) {
  const AttentionShape& shape = call.shape;
  const std::int64_t most = std::max<std::int64_t>(1, kQueries / (shape.heads / shape.groups));
  std::vector<Item> items;
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < shape.samples; ++i) {
    const std::int64_t* step = call.steps + i * (2 + call.pages);
    for (std::int64_t at = 0; at < step[0]; at += most) {
      const std::int64_t count = std::min(most, step[0] - at);
      for (std::int64_t group = 0; group < shape.groups; ++group) {
        items.push_back({row + at, count, step[1] + at, group, step + 2});
      }
    }
    row += step[0];
  }
  return items;
}

// Scratch memory of a thread.
struct Memory {
  std::vector<float> queries, sums, scores;
  std::vector<float> highest, total;

  Memory(std::int64_t rows, std::int64_t row)
      : queries(rows * row), sums(rows * row), scores(rows * kScoreRow), highest(rows), total(rows) {}
};

// Adds what the keys [start, end) of a block give to the item's rows.
template <typename Set>
MEGAZERO_INLINE void attend_block(const Call& call, const Item& item, const Sizes& sizes, std::int64_t rows,
                                  std::int64_t start, std::int64_t end, Memory& memory) {
  const std::int64_t page = call.shape.keys, padded = up_to(end - start, kPanel), limit = call.limits.left;
  const auto place = [&](std::int64_t at) {
    return (item.table[at / page] * call.shape.groups + item.group) * page;  // of the page, in rows
  };
  for (std::int64_t at = start; at < start + padded;) {
    const std::int64_t inside = at % page, count = std::min(page - inside, start + padded - at);
    const float* keys = call.keys + (place(at) + inside) * sizes.size;
    product<Set, false>(rows, count, sizes.size, {memory.queries.data(), sizes.row, 1},
                        {keys, kPanel, kPanel * sizes.size}, memory.scores.data() + at - start, kScoreRow);
    at += count;
  }
  for (std::int64_t i = 0; i < item.count * sizes.sharers; ++i) {
    const std::int64_t own = item.place + i / sizes.sharers, head = item.group * sizes.sharers + i % sizes.sharers;
    float* row = memory.scores.data() + i * kScoreRow;
    const std::int64_t stop = std::max<std::int64_t>(0, std::min(own + 1 - start, padded));
    std::int64_t from = std::max<std::int64_t>(0, std::min(own - limit - start, stop));
    if (call.sinks > 0 && from > 0) {
      std::fill(row + std::max<std::int64_t>(0, std::min(call.sinks - start, from)), row + from, kNothing);
      from = 0;
    }
    if (call.limits.slopes != nullptr && call.limits.slopes[head] != 0.0f) {
      const float slope = call.limits.slopes[head];
      const auto distance = static_cast<std::int32_t>(start - own);
#pragma omp simd
      for (std::int64_t j = from; j < stop; ++j) {
        row[j] += slope * static_cast<float>(distance + static_cast<std::int32_t>(j));
      }
    }
    soften(row, {from, stop}, padded, memory.highest[i], memory.total[i], memory.sums.data() + i * sizes.row, sizes.row);
  }
  // No further than the sequence goes: what is behind it may be anything, and 0 times infinity is not 0.
  for (std::int64_t at = start; at < end;) {
    const std::int64_t inside = at % page, count = std::min(page - inside, end - at);
    const float* values = call.values + (place(at) + inside) * sizes.row;
    product<Set, true>(rows, sizes.row, count, {memory.scores.data() + at - start, kScoreRow, 1},
                       sizes.natural(values), memory.sums.data(), sizes.row);
    at += count;
  }
}

template <typename Set, typename T>
MEGAZERO_INLINE void attend_items(const Call& call, const Item* items, std::int64_t count) {
  Sizes sizes(call.shape);
  const std::int64_t most = up_to(std::max(kQueries, sizes.sharers), kTileRows);
  Memory memory(most, sizes.row);
  const auto at = [&](const HeadTensor& tensor, const Item& item, std::int64_t i) {
    const std::int64_t head = item.group * sizes.sharers + i % sizes.sharers;
    return static_cast<T*>(tensor.at) + (item.row + i / sizes.sharers) * tensor.row + head * tensor.head;
  };
  for (const Item* item = items; item < items + count; ++item) {
    const std::int64_t used = item->count * sizes.sharers, rows = up_to(used, kTileRows);
    for (std::int64_t i = 0; i < rows; ++i) {
      float* into = memory.queries.data() + i * sizes.row;
      if (i < used) {
        copy_in(static_cast<const T*>(at(call.q, *item, i)), 0, 1, sizes, call.shape.scale, into, 1);
      } else {
        std::fill_n(into, sizes.row, 0.0f);
      }
      std::fill_n(memory.scores.data() + i * kScoreRow, kScoreRow, 0.0f);
    }
    std::fill_n(memory.sums.data(), rows * sizes.row, 0.0f);
    std::fill_n(memory.highest.data(), rows, kNothing);
    std::fill_n(memory.total.data(), rows, 0.0f);
    const std::int64_t end = item->place + item->count, first = std::max<std::int64_t>(0, item->place - call.limits.left);
    for (std::int64_t start = 0; start < end; start += kKeys) {
      if (start + kKeys <= first && start >= call.sinks) continue;
      attend_block<Set>(call, *item, sizes, rows, start, std::min(end, start + kKeys), memory);
    }
    for (std::int64_t i = 0; i < used; ++i) {
      copy_out(memory.sums.data() + i * sizes.row, 1, sizes, 1.0f / memory.total[i], at(call.out, *item, i), 0);
    }
  }
}

template <typename T>
void attend_baseline(const Call& call, const Item* items, std::int64_t count) {
  attend_items<BaselineTile, T>(call, items, count);
}

template <typename T>
MEGAZERO_AVX2 void attend_avx2(const Call& call, const Item* items, std::int64_t count) {
  attend_items<Avx2Tile, T>(call, items, count);
}

template <typename T>
MEGAZERO_AVX512 void attend_avx512(const Call& call, const Item* items, std::int64_t count) {
  attend_items<Avx512Tile, T>(call, items, count);
}

}  // namespace
}  // namespace megazero

void megazero_paged_attention(megazero::AttentionShape shape, megazero::AttentionLimits limits, std::int64_t sinks,
                              std::int64_t pages, const std::int64_t* steps, const float* keys, const float* values,
                              megazero::HeadTensor q, megazero::HeadTensor out) {
  using namespace megazero;
  const Call call{shape, limits, sinks, pages, steps, keys, values, q, out};
  const std::vector<Item> items = items_of(call);
  with_element(shape.narrow, [&](auto element) {
    using T = decltype(element);
    const InstructionSet set = std::min(shape.most, instruction_set());
    const auto work = set == InstructionSet::avx512 ? &attend_avx512<T>
                      : set == InstructionSet::avx2 ? &attend_avx2<T>
                                                    : &attend_baseline<T>;
    const auto count = static_cast<std::int64_t>(items.size());
    const int workers = static_cast<int>(std::max<std::int64_t>(1, std::min(shape.threads, count)));
    parallel_for(count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      work(call, items.data() + begin, end - begin);
    });
  });
}
