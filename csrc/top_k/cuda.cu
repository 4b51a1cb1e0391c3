// The columns of the k highest values of each row, best first; of equal ones the lower number comes first, and NaN
// counts as the highest: the order of a stable descending sort. values: fp32, fp16 or bf16 [count, width]; chosen:
// int64 [count, k]. What a router of a mixture of experts asks (Shazeer et al. 2017): a row has at most 1,024 columns,
// and k is at most 32.
//
// A warp takes a row and keeps it in registers. k times over, each lane proposes the best of its columns that is left,
// and the warp takes the best proposal.
#include "common/cuda_rows.hpp"

namespace megazero {

constexpr int kChoosers = 8;  // rows, and warps, of a block

// An integer that is greater for a greater value; 0 is below all. Both zeros are equal, and so are all NaN.
__device__ __forceinline__ std::uint32_t rank_of(float value) {
  if (value != value) return 0xffffffffu;
  const std::uint32_t bits = value == 0.0f ? 0 : __float_as_uint(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <typename T, int EACH>
__global__ void __launch_bounds__(kChoosers* kWarp, 4)
    top_k(std::int64_t count, int width, int k, Global<const T> values, Global<std::int64_t> chosen) {
  const std::int64_t row = first_row();
  if (row >= count) return;
  const int lane = threadIdx.x;
  const Global<const T> own_values = values + (row * width + lane);
  const int left = width - lane;  // columns e * kWarp < left are there
  std::uint32_t ranks[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) ranks[e] = e * kWarp < left ? rank_of(to_float(own_values[e * kWarp])) : 0;
  int own = 0;  // lane j keeps the j-th choice
  for (int j = 0; j < k; ++j) {
    std::uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (ranks[e] > best) {
        best = ranks[e];
        at = e * kWarp;
      }
    }
    // Columns count from the highest, so that of equal values the lower column is the greater proposal.
    std::uint64_t proposal = std::uint64_t{best} << 32 | static_cast<std::uint32_t>(~(at + lane));
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const std::uint64_t other = __shfl_xor_sync(kAllLanes, proposal, distance);
      proposal = other > proposal ? other : proposal;
    }
    const int column = ~static_cast<int>(proposal & 0xffffffffu);
    if (lane == j) own = column;
    const int taken = column - lane;
#pragma unroll
    for (int e = 0; e < EACH; ++e) ranks[e] = e * kWarp == taken ? 0 : ranks[e];
  }
  if (lane < k) chosen[row * k + lane] = own;
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_top_k(std::int64_t dtype, std::int64_t count, std::int64_t width, std::int64_t k,
                                   const void* values, std::int64_t* chosen, void* stream) {
  if (width > 1024 || k > kWarp || k > width) return 1;
  if (count == 0 || k == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto each) {
      return MEGAZERO_LAUNCH((top_k<T, each()>), ceil_div(count, kChoosers), dim3(kWarp, kChoosers), 0, stream, count,
                             width, k, static_cast<const T*>(values), chosen);
    };
    if (width <= kWarp) return start(std::integral_constant<int, 1>{});
    if (width <= 2 * kWarp) return start(std::integral_constant<int, 2>{});
    if (width <= 4 * kWarp) return start(std::integral_constant<int, 4>{});
    if (width <= 8 * kWarp) return start(std::integral_constant<int, 8>{});
    return start(std::integral_constant<int, 32>{});
  });
}
MEGAZERO_EXPORT(top_k)
