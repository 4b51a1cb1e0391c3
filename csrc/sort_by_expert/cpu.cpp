#include "sort_by_expert/cpu.hpp"

#include <algorithm>
#include <utility>
#include <vector>

void megazero_sort_by_expert(std::int64_t count, std::int64_t experts, std::int64_t room, const std::int64_t* chosen,
                             const std::uint8_t* kept, std::int64_t* choice, std::int64_t* slots,
                             std::int64_t* counts) {
  const auto cell = [&](std::int64_t at) {
    const bool there = (kept == nullptr || kept[at] != 0) && chosen[at] >= 0 && chosen[at] < experts;
    return static_cast<std::size_t>(there ? chosen[at] : experts);
  };
  std::vector<std::int64_t> next(static_cast<std::size_t>(experts + 1), 0);  // the row of a cell's next choice
  if (room >= 0) {
    std::fill_n(choice, experts * room, -1);
    std::fill_n(counts, experts, room);
    for (std::int64_t at = 0; at < count; ++at) {
      const std::size_t own = cell(at);
      const bool fits = own < static_cast<std::size_t>(experts) && next[own] < room;
      slots[at] = fits ? static_cast<std::int64_t>(own) * room + next[own]++ : experts * room;
      if (fits) choice[slots[at]] = at;
    }
    return;
  }
  for (std::int64_t at = 0; at < count; ++at) ++next[cell(at)];
  std::int64_t start = 0;
  for (std::size_t own = 0; own < next.size(); ++own) {
    if (own < static_cast<std::size_t>(experts)) counts[own] = next[own];
    start += std::exchange(next[own], start);
  }
  for (std::int64_t at = 0; at < count; ++at) {
    slots[at] = next[cell(at)]++;
    choice[slots[at]] = at;
  }
}
