// The sort of random-LTD (Yao et al. 2022): which `kept` of `length` tokens a layer sees of each sample, in ascending
// order. Each token has a random number, a function of (the sample's key, the token); those with the least are kept.
// keys: int64 [count]; columns: int64 [count, kept].
//
// A block takes a sample. Nothing is sorted: the bound below which exactly `kept` numbers lie is found bit by bit, from
// the highest, by counting; some twenty counts do, as the numbers are spread evenly. Then each warp votes, and a kept
// token's place is how many votes come before it.
#include "common/cuda_rows.hpp"
#include "common/cuda_splitmix.hpp"

namespace megazero {

constexpr int kMostThreads = 1024;
constexpr std::uint64_t kTopBit = std::uint64_t{1} << 63;

// The tokens' numbers, all of them distinct: the lowest `low` bits are the token itself. As signed numbers they are in
// the order in which these are as unsigned ones.
struct TokenNumbers {
  std::uint64_t start;
  int low;

  __device__ __forceinline__ std::uint64_t of(int token) const {
    const std::uint64_t bits = mix_64(start + (static_cast<std::uint64_t>(token) + 1) * kGoldenGamma);
    return (bits >> low << low | static_cast<std::uint64_t>(token)) ^ kTopBit;
  }
};

// The sum over the block of what each thread counted, at most 2^24.
__device__ __forceinline__ int block_count(int own) {
  float sum[1] = {static_cast<float>(own)};
  row_sums(sum);
  return static_cast<int>(sum[0]);
}

// A number with exactly `kept` of the numbers below it.
__device__ __forceinline__ std::uint64_t bound_of(const TokenNumbers& numbers, int length, int kept) {
  std::uint64_t bound = 0;
  for (std::uint64_t bit = kTopBit; bit != 0; bit >>= 1) {
    const std::uint64_t higher = bound | bit;
    int own = 0;
    for (int token = threadIdx.x; token < length; token += blockDim.x) own += numbers.of(token) < higher;
    const int below = block_count(own);
    if (below <= kept) bound = higher;
    if (below == kept) break;
  }
  return bound;
}

__global__ void __launch_bounds__(kMostThreads)
    kept_columns(int length, int kept, int low, Cached<std::int64_t> keys, Global<std::int64_t> columns) {
  MEGAZERO_SHARED(int, counts, kWarp);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const std::int64_t sample = blockIdx.x;
  const TokenNumbers numbers{mix_64(static_cast<std::uint64_t>(static_cast<std::int64_t>(keys[sample]))), low};
  const bool all = kept == length;
  const std::uint64_t bound = all ? 0 : bound_of(numbers, length, kept);
  const Global<std::int64_t> own = columns + sample * kept;
  int before = 0;  // kept tokens of earlier tiles
  for (int tile = 0; tile < length; tile += blockDim.x) {
    const int token = tile + threadIdx.x;
    const bool stays = token < length && (all || numbers.of(token) < bound);
    const unsigned votes = __ballot_sync(kAllLanes, stays);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    const float count = lane < warps ? static_cast<float>(static_cast<int>(counts[lane])) : 0.0f;
    const int earlier = static_cast<int>(warp_sum(lane < warp ? count : 0.0f));
    if (stays) own[before + earlier + __popc(votes & ((1u << lane) - 1))] = token;
    before += static_cast<int>(warp_sum(count));
    __syncthreads();  // the counts have been read
  }
}

}  // namespace megazero

using namespace megazero;

// low: bits that a token's number takes, fewer than 64.
extern "C" int megazero_cuda_kept_columns(std::int64_t count, std::int64_t length, std::int64_t kept, std::int64_t low,
                                          const std::int64_t* keys, std::int64_t* columns, void* stream) {
  if (length > 1 << 24 || kept > length || kept < 0 || low < 1 || low > 63 || ((length - 1) >> low) != 0) return 1;
  if (count == 0 || kept == 0) return 0;
  unsigned threads = kWarp;
  while (threads < kMostThreads && threads < length) threads *= 2;
  return MEGAZERO_LAUNCH((kept_columns), dim3(static_cast<unsigned>(count)), dim3(threads), 0, stream, length, kept,
                         low, keys, columns);
}
MEGAZERO_EXPORT(kept_columns)
