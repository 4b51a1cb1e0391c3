// The sum of the squares of all elements of a list of segments, in double, and whether it is finite.
//
// Squares of floats fit into a double and so do their sums, so the result is not finite only if an element is not. Each
// chunk has a sum of its own; these are added in their order, so the result repeats bit for bit.
#include "common/cuda_segments.hpp"

namespace megazero {

constexpr int kSquareThreads = 256;
constexpr int kTotalThreads = 1024;

// Packs of 16 bytes of one buffer.
template <typename T>
using SquareSegments = Segments<1, 16 / static_cast<int>(sizeof(T))>;

template <typename T>
__global__ void __launch_bounds__(kSquareThreads)
    square_sums(const __grid_constant__ SquareSegments<T> all, Global<double> partials) {
  double sum[1] = {0.0};
  const Chunk chunk = all.chunk_of(static_cast<int>(blockIdx.x));
  const Global<const T> elements = all.template buffer<const T>(0, chunk.segment);
  all.each_pack(chunk, [&](std::int64_t i, auto pack) {
    constexpr int N = decltype(pack)::value;
    const auto own = load_pack<N>(elements, i);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const double x = to_float(own.at[n]);
      sum[0] += x * x;
    }
  });
  block_sums(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum[0];
}

// One block. overflow: 1 if the total is not finite, otherwise 0; may be null.
__global__ void __launch_bounds__(kTotalThreads)
    square_total(std::int64_t count, Global<const double> partials, Global<double> total, Global<float> overflow) {
  double sum[1] = {0.0};
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum[0] += partials[i];
  block_sums(sum);
  if (threadIdx.x != 0) return;
  total[0] = sum[0];
  if (overflow) overflow[0] = sum[0] - sum[0] == 0.0 ? 0.0f : 1.0f;
}

}  // namespace megazero

using namespace megazero;

// partials: scratch of at least the sum of length / chunk + 2 over all segments. total: one double. overflow: as above.
extern "C" int megazero_cuda_square_sum(std::int64_t dtype, std::int64_t count, std::int64_t chunk,
                                        const std::int64_t* lengths, const std::int64_t* addresses, double* partials,
                                        double* total, float* overflow, void* stream) {
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const BufferList lists[] = {{addresses, sizeof(T)}};
    std::int64_t used = 0;
    const auto start = [&](auto& all, int chunks, auto) {
      if (chunks == 0) return 0;
      double* own = partials + used;
      used += chunks;
      return MEGAZERO_LAUNCH((square_sums<T>), chunks, kSquareThreads, 0, stream, all, own);
    };
    const int code = for_segments<SquareSegments<T>>(count, lengths, lists, chunk, start);
    if (code != 0) return code;
    return MEGAZERO_LAUNCH((square_total), 1, kTotalThreads, 0, stream, used, partials, total, overflow);
  });
}
MEGAZERO_EXPORT(square_sum)
