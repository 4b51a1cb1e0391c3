// The rows that tokens' choices of experts make, sorted by expert, those of one expert in the choices' order: a
// counting sort whose counts are integers added in a fixed order. chosen: int64 [count]; kept: bool [count] or null;
// slots: int64 [count], the row of each choice; choice: int64, the choice of each row; counts: int64 [experts].
//
// Without `room` (negative) there are `count` rows, those of choices that are not kept last. With it, each expert has
// that many rows; a choice that is not kept or finds no room has the slot experts * room; blank rows have the choice
// -1.
//
// A choice's cell is its expert, or `experts` if it has none. Three launches: each block counts the cells of its
// choices; for each cell, these counts are added up over the blocks before; then each choice's row is where its cell's
// rows begin, plus how many of them come before it in earlier blocks, earlier warps, earlier steps of its warp and
// earlier lanes. Within a warp, lanes of one cell find each other by votes on the bits of its number.
#include <algorithm>

#include "common/cuda.hpp"

namespace megazero {

constexpr int kSortWarps = 8, kSortSteps = 4;
constexpr int kSortThreads = kSortWarps * kWarp;
constexpr int kSortedByBlock = kSortThreads * kSortSteps;
constexpr int kSegments = 16;      // of the blocks, whose counts are added up side by side
constexpr int kMostExperts = 1024;  // their counts for each warp fit in shared memory

struct Choices {
  std::int64_t count;
  int experts, bits;  // of the highest cell's number
  Cached<std::int64_t> chosen;
  Cached<std::uint8_t> kept;

  __device__ __forceinline__ int cells() const { return experts + 1; }

  __device__ __forceinline__ int cell(std::int64_t at) const {
    const std::int64_t expert = chosen[at];
    const bool there = expert >= 0 && expert < experts && (!kept || kept[at] != 0);
    return there ? static_cast<int>(expert) : experts;
  }

  // The choice of this lane in a step of its warp; a warp's choices are neighbours.
  static __device__ __forceinline__ std::int64_t place(int step) {
    const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kSortWarps + threadIdx.x / kWarp;
    return (warp * kSortSteps + step) * kWarp + threadIdx.x % kWarp;
  }
};

// The choices of a warp: each one's cell, and how many of that cell the warp has before it.
struct WarpRanks {
  int cell[kSortSteps], rank[kSortSteps];

  // `own` are the warp's counts of cells, zero at first.
  __device__ __forceinline__ void count(const Choices& choices, const SharedArray<int>& counts, int own) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < kSortSteps; ++step) {
      const std::int64_t at = Choices::place(step);
      const bool there = at < choices.count;
      cell[step] = there ? choices.cell(at) : 0;
      unsigned alike = __ballot_sync(kAllLanes, there);
      for (int bit = 0; bit < choices.bits; ++bit) {
        const bool set = (cell[step] >> bit & 1) != 0;
        const unsigned votes = __ballot_sync(kAllLanes, set);
        alike &= set ? votes : ~votes;
      }
      const int before = there ? static_cast<int>(counts[own + cell[step]]) : 0;
      rank[step] = before + __popc(alike & ((1u << lane) - 1));
      __syncwarp();  // all have read
      if (there && __ffs(static_cast<int>(alike)) == lane + 1) counts[own + cell[step]] = before + __popc(alike);
      __syncwarp();
    }
  }
};

// counts[w * cells + cell] of each warp w; the block's barrier is still to come.
__device__ __forceinline__ void count_choices(const Choices& choices, const SharedArray<int>& counts,
                                              WarpRanks& ranks) {
  const int own = static_cast<int>(threadIdx.x) / kWarp * choices.cells();
  for (int cell = threadIdx.x % kWarp; cell < choices.cells(); cell += kWarp) counts[own + cell] = 0;
  __syncwarp();
  ranks.count(choices, counts, own);
}

// by_block: int32 [blocks, cells].
__global__ void __launch_bounds__(kSortThreads) expert_counts(Choices choices, Global<int> by_block) {
  MEGAZERO_DYNAMIC_SHARED(int, counts);
  WarpRanks ranks;
  count_choices(choices, counts, ranks);
  __syncthreads();
  const int cells = choices.cells();
  for (int cell = threadIdx.x; cell < cells; cell += kSortThreads) {
    int sum = 0;
    for (int warp = 0; warp < kSortWarps; ++warp) sum += counts[warp * cells + cell];
    by_block[static_cast<std::int64_t>(blockIdx.x) * cells + cell] = sum;
  }
}

// earlier: int32 [blocks, cells], the counts of the blocks before; totals: int32 [cells]. A thread takes a cell and a
// segment of the blocks.
__global__ void __launch_bounds__(kWarp* kSegments)
    expert_starts(int blocks, int experts, std::int64_t room, Cached<int> by_block, Global<int> earlier,
                  Global<int> totals, Global<std::int64_t> counts) {
  MEGAZERO_SHARED(int, sums, kWarp * kSegments);
  const int cells = experts + 1, lane = threadIdx.x, segment = threadIdx.y;
  const int cell = static_cast<int>(blockIdx.x) * kWarp + lane, length = (blocks + kSegments - 1) / kSegments;
  const int begin = segment * length, end = begin + length < blocks ? begin + length : blocks;
  const bool there = cell < cells;
  int sum = 0;
  if (there) {
#pragma unroll 4
    for (int block = begin; block < end; ++block) sum += by_block[static_cast<std::int64_t>(block) * cells + cell];
  }
  sums[segment * kWarp + lane] = sum;
  __syncthreads();
  if (!there) return;
  int before = 0;
  for (int each = 0; each < segment; ++each) before += sums[each * kWarp + lane];
#pragma unroll 4
  for (int block = begin; block < end; ++block) {
    const std::int64_t at = static_cast<std::int64_t>(block) * cells + cell;
    earlier[at] = before;
    before += by_block[at];
  }
  if (segment != kSegments - 1) return;
  totals[cell] = before;
  if (cell < experts) counts[cell] = room >= 0 ? room : before;
}

// starts[cell] = the sum of the totals of the cells before, by one warp.
__device__ __forceinline__ void add_up_totals(int cells, Cached<int> totals, const SharedArray<int>& shared,
                                              int starts) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int first = 0; first < cells; first += kWarp) {
    const int own = first + lane < cells ? static_cast<int>(totals[first + lane]) : 0;
    int sum = own;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (first + lane < cells) shared[starts + first + lane] = before + sum - own;
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
}

__global__ void __launch_bounds__(kSortThreads)
    expert_rows(Choices choices, std::int64_t room, Cached<int> earlier, Cached<int> totals,
                Global<std::int64_t> choice, Global<std::int64_t> slots) {
  MEGAZERO_DYNAMIC_SHARED(int, shared);
  const int cells = choices.cells(), starts = kSortWarps * cells, warp = static_cast<int>(threadIdx.x) / kWarp;
  WarpRanks ranks;
  count_choices(choices, shared, ranks);
  if (room < 0 && warp == 0) add_up_totals(cells, totals, shared, starts);
  __syncthreads();
  // From each warp's counts to where its first choice of a cell stands.
#pragma unroll 1  // more at a time would not fit into the registers
  for (int cell = threadIdx.x; cell < cells; cell += kSortThreads) {
    int before = earlier[static_cast<std::int64_t>(blockIdx.x) * cells + cell];
    if (room < 0) before += shared[starts + cell];
    for (int each = 0; each < kSortWarps; ++each) {
      const int own = shared[each * cells + cell];
      shared[each * cells + cell] = before;
      before += own;
    }
  }
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kSortSteps; ++step) {
    const std::int64_t at = Choices::place(step);
    if (at >= choices.count) continue;
    const int cell = ranks.cell[step];
    std::int64_t row = static_cast<int>(shared[warp * cells + cell]) + ranks.rank[step];
    bool has_row = true;
    if (room >= 0) {
      has_row = cell < choices.experts && row < room;
      row = has_row ? cell * room + row : choices.experts * room;
    }
    slots[at] = row;
    if (has_row) choice[row] = at;
  }
  if (room < 0) return;
  for (int expert = blockIdx.x; expert < choices.experts; expert += static_cast<int>(gridDim.x)) {
    for (std::int64_t row = totals[expert] + static_cast<std::int64_t>(threadIdx.x); row < room; row += kSortThreads) {
      choice[expert * room + row] = -1;
    }
  }
}

}  // namespace megazero

using namespace megazero;

// workspace: int32 [2 blocks + 1, experts + 1], for blocks of 1,024 choices, one at least.
extern "C" int megazero_cuda_sort_by_expert(std::int64_t count, std::int64_t blocks, std::int64_t experts,
                                            std::int64_t room, const std::int64_t* chosen, const void* kept,
                                            int* workspace, std::int64_t* choice, std::int64_t* slots,
                                            std::int64_t* counts, void* stream) {
  if (experts < 0 || experts > kMostExperts || count < 0 || count > 2147483647 - kSortedByBlock) return 1;
  if (blocks != std::max(1, ceil_div(count, kSortedByBlock))) return 1;
  int bits = 0;
  while (experts >> bits != 0) ++bits;
  const Choices choices{count, static_cast<int>(experts), bits, chosen, static_cast<const std::uint8_t*>(kept)};
  const std::int64_t cells = experts + 1;
  int* const earlier = workspace + blocks * cells;
  int* const totals = earlier + blocks * cells;
  const dim3 grid(static_cast<unsigned>(blocks));
  const std::size_t by_warp = static_cast<std::size_t>(kSortWarps * cells) * sizeof(int);
  int code = MEGAZERO_LAUNCH((expert_counts), grid, dim3(kSortThreads), by_warp, stream, choices, workspace);
  if (code != 0) return code;
  code = MEGAZERO_LAUNCH((expert_starts), dim3(static_cast<unsigned>(ceil_div(cells, kWarp))), dim3(kWarp, kSegments),
                         0, stream, blocks, experts, room, workspace, earlier, totals, counts);
  if (code != 0) return code;
  const std::size_t with_starts = by_warp + static_cast<std::size_t>(cells) * sizeof(int);
  return MEGAZERO_LAUNCH((expert_rows), grid, dim3(kSortThreads), with_starts, stream, choices, room, earlier, totals,
                         choice, slots);
}
MEGAZERO_EXPORT(sort_by_expert)
