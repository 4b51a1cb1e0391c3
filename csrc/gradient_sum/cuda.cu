// Gradients are added to their sums, or begin them, for a list of segments: sum = before + gradient, in float, rounded
// to the sum's type once. A gradient has the sum's type or the sum is fp32.
#include "common/cuda_segments.hpp"

namespace megazero {

constexpr int kSumThreads = 256;
constexpr std::int64_t kSumChunk = 4096;

// Before: the sum itself, or null where there is none yet.
enum SumBuffer { kSum, kGradient, kBefore };
using SumSegments = Segments<3, 4>;
static_assert(sizeof(SumSegments) <= 4096 - 128, "a launch takes 4 KiB of arguments everywhere");

template <typename G, typename S>
__global__ void __launch_bounds__(kSumThreads) gradient_sum(const __grid_constant__ SumSegments all) {
  const Chunk chunk = all.chunk_of(static_cast<int>(blockIdx.x));
  const int segment = chunk.segment;
  const bool adds = all.at[kBefore][segment] != nullptr;
  all.each_pack(chunk, [&](std::int64_t i, auto pack) {
    constexpr int N = decltype(pack)::value;
    const auto gradient = load_pack<N>(all.template buffer<const G>(kGradient, segment), i);
    Pack<float, N> total;
#pragma unroll
    for (int n = 0; n < N; ++n) total.at[n] = to_float(gradient.at[n]);
    if (adds) {
      const auto before = load_pack<N>(all.template buffer<const S>(kBefore, segment), i);
#pragma unroll
      for (int n = 0; n < N; ++n) total.at[n] = to_float(before.at[n]) + total.at[n];
    }
    Pack<S, N> sum;
#pragma unroll
    for (int n = 0; n < N; ++n) sum.at[n] = from_float<S>(total.at[n]);
    store_pack<N>(all.template buffer<S>(kSum, segment), i, sum);
  });
}

}  // namespace megazero

using namespace megazero;

// Lists of `count` addresses; those of `befores` are 0 or those of `sums`.
extern "C" int megazero_cuda_gradient_sum(std::int64_t gradient_dtype, std::int64_t sum_dtype, std::int64_t count,
                                          const std::int64_t* lengths, const std::int64_t* sums,
                                          const std::int64_t* gradients, const std::int64_t* befores, void* stream) {
  return with_elements(gradient_dtype, sum_dtype, [&](auto gradient, auto sum) {
    using G = decltype(gradient);
    using S = decltype(sum);
    const BufferList lists[] = {{sums, sizeof(S)}, {gradients, sizeof(G)}, {befores, sizeof(S)}};
    return for_segments<SumSegments>(count, lengths, lists, kSumChunk, [&](auto& all, int chunks, auto) {
      return chunks == 0 ? 0
                         : MEGAZERO_LAUNCH((gradient_sum<G, S>), chunks, kSumThreads, 0, stream, all);
    });
  });
}
MEGAZERO_EXPORT(gradient_sum)
