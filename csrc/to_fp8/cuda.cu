// A matrix as 8-bit floats: codes = round(clamp(x * scale)), by rows and, where wanted, transposed too, and the largest
// magnitude of x, all in one pass. x: [rows, width] in float, fp16 or bf16. Formats: 0 is e4m3, 1 is e5m2. What is too
// large becomes the largest number; infinities and NaN become NaN.
//
// A block takes tiles of 64 x 64; a thread has four neighbouring columns of four neighbouring rows, whose codes it turns
// in registers. They cross to the threads that write columns in shared memory, where the place of a word is mixed with
// its row and column so that no two lanes meet in a bank.
#include "common/cuda_fp8.hpp"

namespace megazero {

constexpr int kFp8Threads = 256;
constexpr int kFour = 4;
constexpr int kSide = 64;            // of a tile
constexpr int kWords = kSide / kFour;  // of four codes, along a side
constexpr std::int64_t kMostBlocks = 2112;  // 16 for each multiprocessor of an H100: few enough for one maximum each

struct Fp8Tiles {
  std::int64_t rows, width, across, count;
  bool packs, turned_packs;  // whether all of x and of the codes, and of the turned codes, can be reached in fours
};

// Four neighbouring elements of a row; what lies beyond its end is zero.
template <typename T>
__device__ __forceinline__ Pack<T, kFour> four_of(Global<const T> row, std::int64_t column, const Fp8Tiles& tiles) {
  if (tiles.packs) return load_pack<kFour>(row, column);
  Pack<T, kFour> some{};
#pragma unroll
  for (int n = 0; n < kFour; ++n) {
    if (column + n < tiles.width) some.at[n] = row[column + n];
  }
  return some;
}

// Writes four codes at `column` of a line, as many as fit before its end.
__device__ __forceinline__ void put_four(Global<std::uint8_t> line, std::int64_t column, std::int64_t end, bool packs,
                                         unsigned word) {
  if (packs) {
    Pack<std::uint8_t, kFour> codes;
#pragma unroll
    for (int n = 0; n < kFour; ++n) codes.at[n] = static_cast<std::uint8_t>(word >> 8 * n);
    store_pack<kFour>(line, column, codes);
    return;
  }
#pragma unroll
  for (int n = 0; n < kFour; ++n) {
    if (column + n < end) line[column + n] = static_cast<std::uint8_t>(word >> 8 * n);
  }
}

// The place in shared memory of the codes of four rows, the `quad`-th of the tile's, in one of its columns.
__device__ __forceinline__ int place_of(int column, int quad) {
  return (column ^ (quad & 1)) * kWords + (quad ^ column / kFour);
}

template <typename Format>
__device__ __forceinline__ unsigned scaled_code(float x, float scale) {
  const float wide = __fmul_rn(x, scale);
  const float zero = __fsub_rn(wide, wide);  // NaN for what is not finite; -0 becomes 0
  return zero != zero ? Format::kNan : Format::code(__fadd_rn(wide, zero));
}

// amax: the bits of a float, which are ordered as non-negative floats are, with NaN on top; may be null. turned: null or
// [width, rows].
template <typename T, typename Format>
__global__ void __launch_bounds__(kFp8Threads)
    to_fp8(Fp8Tiles tiles, Global<const T> x, Cached<float> scale, Global<unsigned> amax, Global<std::uint8_t> codes,
           Global<std::uint8_t> turned) {
  MEGAZERO_SHARED(unsigned, columns, kSide* kWords);
  MEGAZERO_SHARED(unsigned, largest, kFp8Threads / kWarp);
  const int thread = static_cast<int>(threadIdx.x), word = thread % kWords, quad = thread / kWords;
  const float factor = scale[0];
  unsigned greatest = 0;
  for (std::int64_t tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const std::int64_t first_row = tile / tiles.across * kSide, first_column = tile % tiles.across * kSide;
    const std::int64_t row = first_row + quad * kFour, column = first_column + word * kFour;
    Pack<T, kFour> own[kFour];
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      own[k] = Pack<T, kFour>{};
      if (row + k < tiles.rows && column < tiles.width) own[k] = four_of<T>(x + (row + k) * tiles.width, column, tiles);
    }
    unsigned by_column[kFour] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      unsigned by_row = 0;
#pragma unroll
      for (int n = 0; n < kFour; ++n) {
        const float value = to_float(own[k].at[n]);
        const unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
        greatest = magnitude > greatest ? magnitude : greatest;
        const unsigned code = scaled_code<Format>(value, factor);
        by_row |= code << 8 * n;
        by_column[n] |= code << 8 * k;
      }
      if (row + k < tiles.rows && column < tiles.width) {
        put_four(codes + (row + k) * tiles.width, column, tiles.width, tiles.packs, by_row);
      }
    }
    if (!turned) continue;
#pragma unroll
    for (int n = 0; n < kFour; ++n) columns[place_of(word * kFour + n, quad)] = by_column[n];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      const int line = k * (kFp8Threads / kWords) + quad;
      const std::int64_t at = first_row + word * kFour;
      if (first_column + line < tiles.width && at < tiles.rows) {
        put_four(turned + (first_column + line) * tiles.rows, at, tiles.rows, tiles.turned_packs,
                 columns[place_of(line, word)]);
      }
    }
    __syncthreads();
  }
  if (!amax) return;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, greatest, distance);
    greatest = other > greatest ? other : greatest;
  }
  if (thread % kWarp == 0) largest[thread / kWarp] = greatest;
  __syncthreads();
  if (thread != 0) return;
  for (int warp = 1; warp < kFp8Threads / kWarp; ++warp) {
    const unsigned other = largest[warp];
    greatest = other > greatest ? other : greatest;
  }
  atomicMax(amax, greatest);
}

}  // namespace megazero

using namespace megazero;

// scale, amax: one float each; amax becomes the largest of what it was and of x. amax and turned may be null.
extern "C" int megazero_cuda_to_fp8(std::int64_t dtype, std::int64_t rows, std::int64_t width, std::int64_t format,
                                    const void* x, const float* scale, void* amax, std::uint8_t* codes,
                                    std::uint8_t* turned, void* stream) {
  if (rows == 0 || width == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const std::int64_t across = (width + kSide - 1) / kSide, count = across * ((rows + kSide - 1) / kSide);
    const bool packs = width % kFour == 0 && aligned(x, kFour * sizeof(T)) && aligned(codes, kFour);
    const Fp8Tiles tiles{rows, width, across, count, packs, rows % kFour == 0 && aligned(turned, kFour)};
    const auto blocks = static_cast<unsigned>(count < kMostBlocks ? count : kMostBlocks);
    const auto launch = [&](auto kind) {
      return MEGAZERO_LAUNCH((to_fp8<T, decltype(kind)>), blocks, kFp8Threads, 0, stream, tiles,
                             static_cast<const T*>(x), scale, static_cast<unsigned*>(amax), codes, turned);
    };
    return format == 0 ? launch(E4m3{}) : format == 1 ? launch(E5m2{}) : 1;
  });
}
MEGAZERO_EXPORT(to_fp8)
