// What the caller of a kernel that sums over rows has to provide: the sizes of its workspaces.
#include "common/cuda_sums.hpp"

using namespace megazero;

// How many groups of threads add up columns of `count` rows: the rows of the partial sums.
extern "C" int megazero_cuda_column_groups(std::int64_t count, std::int64_t width) {
  return static_cast<int>(column_groups(count, width));
}
MEGAZERO_EXPORT(column_groups)

// How many counters their blocks need at most: those of a kernel whose blocks have columns that do not come in packs.
extern "C" int megazero_cuda_column_counters(std::int64_t groups, std::int64_t width) {
  const ColumnLaunch launch = column_launch(groups, width, 1);
  return static_cast<int>(launch.blocks.x * counters_of(launch.blocks.y));
}
MEGAZERO_EXPORT(column_counters)
