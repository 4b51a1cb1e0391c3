// Blockwise symmetric quantization for communication (ZeRO++, Wang et al. 2023): x [rows, width] in float, fp16 or bf16
// and packed rows, each of ceil(width / block) fp32 scales and then the codes, filled up with zeros to a multiple of
// 4 bytes. Formats: 0 is int8, 1 is int4 (the even element is the low half of its byte), 2 is fp8 e4m3.
//
// scale = max(max |x| / largest, 2^-126), code = round(x / scale): to nearest, ties to even, or stochastically with the
// random bits of a SplitMix64 stream. All conversions are spelled in integers and in operations that no compiler fuses,
// so every device gives the bits of csrc/quantize/cpu.cpp.
//
// 2 to 32 lanes of a warp take a block, four elements of it at a time; those of a block of up to 256 stay in registers
// between the search for the largest and the rounding; those of a larger one are read again, mostly from the cache.
#include "common/cuda_fp8.hpp"
#include "common/cuda_splitmix.hpp"

namespace megazero {

constexpr std::int64_t kInt8 = 0, kInt4 = 1, kFp8 = 2;
constexpr int kQuantizeThreads = 256;
constexpr int kFour = 4;
constexpr int kKept = 2;  // packs of four that a lane keeps, if a block has no more
constexpr unsigned kNan = 0x7fc00000u;
constexpr float kLargestFloat = 3.4028234663852886e38f;

// Four codes side by side: a word, or half of one for int4.
template <std::int64_t format>
using CodeWord = std::conditional_t<format == kInt4, std::uint16_t, std::uint32_t>;
template <std::int64_t format>
constexpr int kCodeBits = format == kInt4 ? 4 : 8;

// Where things are in packed rows. `lanes` share a block.
struct Layout {
  std::int64_t width, block, blocks, all_blocks, row_bytes;
  int lanes;
  bool packs;  // all of x can be reached in packs of four

  __device__ __forceinline__ std::int64_t number() const {
    return static_cast<std::int64_t>(blockIdx.x) * (kQuantizeThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  }

  // This lane's place among those that share its block: their number is a power of two.
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes - 1); }
};

// One block: its row, its scale's place in the row, its first element, and how many it has.
struct BlockPlace {
  std::int64_t row, in_row, at;
  int count;

  __device__ __forceinline__ BlockPlace(std::int64_t number, const Layout& layout)
      : row(layout.blocks == layout.all_blocks ? 0 : number / layout.blocks),
        in_row(number - row * layout.blocks),
        at(in_row * layout.block),
        count(static_cast<int>(layout.width - at < layout.block ? layout.width - at : layout.block)) {}
};

// Where a block's codes begin, in words of four.
template <std::int64_t format>
__device__ __forceinline__ std::int64_t first_code(const Layout& layout, const BlockPlace& place) {
  const std::int64_t bytes = place.row * layout.row_bytes + 4 * layout.blocks + place.at * kCodeBits<format> / 8;
  return bytes / static_cast<std::int64_t>(sizeof(CodeWord<format>));
}

// Four elements from the i-th of a block on; what lies beyond its end is zero.
template <typename T>
__device__ __forceinline__ Pack<float, kFour> load_four(Global<const T> x, int i, int count, bool packs) {
  Pack<float, kFour> found{};
  if (packs && i + kFour <= count) {
    const auto stored = load_pack<kFour>(x, i);
#pragma unroll
    for (int n = 0; n < kFour; ++n) found.at[n] = to_float(stored.at[n]);
  } else {
#pragma unroll
    for (int n = 0; n < kFour; ++n) {
      if (i + n < count) found.at[n] = to_float(static_cast<T>(x[i + n]));
    }
  }
  return found;
}

// The largest of the lanes that share a block.
__device__ __forceinline__ unsigned largest_of_lanes(unsigned value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// The top 24 bits of a SplitMix64 stream's number at `index`, as a fraction.
__device__ __forceinline__ float uniform(std::uint64_t start, std::uint64_t index) {
  const std::uint64_t bits = mix_64(start + (index + 1) * kGoldenGamma);
  return __fmul_rn(static_cast<float>(static_cast<int>(bits >> 40)), 0x1p-24f);
}

// 2^(exponent - 3) of x, at least 2^-9, is the distance between fp8 numbers around it; this is 1 over it, and 1 for
// integers.
template <std::int64_t format>
__device__ __forceinline__ float codes_per_one(float x) {
  if constexpr (format != kFp8) return 1.0f;
  const unsigned exponent = __float_as_uint(x) >> 23 & 255u;
  return __uint_as_float((257u - (exponent < 121u ? 121u : exponent)) << 23);
}

// One code unit up or down, up with a probability that is the distance from below. All products are exact.
__device__ __forceinline__ float rounded_by_chance(float x, float per_one, float chance) {
  const float whole = __fmul_rn(x, per_one);
  const float towards_zero = static_cast<float>(static_cast<int>(whole));
  const float below = towards_zero - (towards_zero > whole ? 1.0f : 0.0f);
  const float rounded = below + (chance < __fsub_rn(whole, below) ? 1.0f : 0.0f);
  return __fmul_rn(rounded, __uint_as_float((254u << 23) - __float_as_uint(per_one)));
}

// To the nearest integer, ties to even, within `largest`: adding 1.5 * 2^23 leaves no room for a fraction.
__device__ __forceinline__ unsigned integer_code(float x, float largest) {
  const float within = x > largest ? largest : (x < -largest ? -largest : x);
  return __float_as_uint(__fadd_rn(within, 0x1.8p23f)) - __float_as_uint(0x1.8p23f);
}

template <std::int64_t format>
__device__ __forceinline__ unsigned code_of(float quotient) {
  if constexpr (format == kInt8) return integer_code(quotient, 127.0f) & 255u;
  if constexpr (format == kInt4) return integer_code(quotient, 7.0f) & 15u;
  return E4m3::code(quotient);
}

// What a code stands for, in units of the scale.
template <std::int64_t format>
__device__ __forceinline__ float value_of(unsigned code) {
  if constexpr (format == kInt8) return static_cast<float>(static_cast<int>(code ^ 128u) - 128);
  if constexpr (format == kInt4) return static_cast<float>(static_cast<int>(code ^ 8u) - 8);
  // The exponent's offset is 7 here and 127 there. NaN is no code of ours.
  const float magnitude = __fmul_rn(__uint_as_float((code & 127u) << 20), 0x1p120f);
  return __uint_as_float(__float_as_uint(magnitude) | (code & 128u) << 24);
}

template <std::int64_t format>
constexpr float kLargestCode = format == kInt8 ? 127.0f : format == kInt4 ? 7.0f : 448.0f;

// Calls body(i, k) for this lane's packs of a block, the first elements of which are i; k counts them if all are KEPT.
template <int KEPT, typename Body>
__device__ __forceinline__ void each_four(const Layout& layout, int end, const Body& body) {
  const int lane = layout.lane(), stride = layout.lanes * kFour;
  if constexpr (KEPT > 0) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      const int i = k * stride + lane * kFour;
      if (i < end) body(i, k);
    }
  } else {
    for (int i = lane * kFour; i < end; i += stride) body(i, 0);
  }
}

// Four elements over the scale, as codes; what is beyond the block's end becomes 0. `index` is the first's number in the
// stream.
template <std::int64_t format>
__device__ __forceinline__ CodeWord<format> codes_of(const Pack<float, kFour>& values, float scale, int left,
                                                     bool stochastic, std::uint64_t start, std::uint64_t index) {
  unsigned word = 0;
#pragma unroll
  for (int n = 0; n < kFour; ++n) {
    float value = __fdiv_rn(values.at[n], scale);
    if (stochastic) value = rounded_by_chance(value, codes_per_one<format>(value), uniform(start, index + n));
    if (n < left) word |= code_of<format>(value) << n * kCodeBits<format>;
  }
  return static_cast<CodeWord<format>>(word);
}

// words and codes are the same memory. KEPT packs of four are all that a lane has of a block; 0: it reads them twice.
template <typename T, std::int64_t format, int KEPT>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize(Layout layout, Global<const T> x, bool stochastic, std::uint64_t start, std::uint64_t first,
             Global<std::uint32_t> words, Global<CodeWord<format>> codes) {
  const std::int64_t number = layout.number();
  const bool active = number < layout.all_blocks;  // all lanes meet in the search
  const BlockPlace place(active ? number : 0, layout);
  const int count = active ? place.count : 0;
  const std::int64_t from = place.row * layout.width + place.at;
  const Global<const T> own = x + from;
  Pack<float, kFour> kept[KEPT > 0 ? KEPT : 1];
  unsigned bits = 0;
  each_four<KEPT>(layout, count, [&](int i, int k) {
    kept[k] = load_four<T>(own, i, count, layout.packs);
#pragma unroll
    for (int n = 0; n < kFour; ++n) {
      const unsigned magnitude = __float_as_uint(kept[k].at[n]) & 0x7fffffffu;
      bits = magnitude > bits ? magnitude : bits;
    }
  });
  bits = largest_of_lanes(bits, layout.lanes);
  if (!active) return;
  const bool finite = bits < 0x7f800000u;
  const float quotient = __fdiv_rn(__uint_as_float(bits), kLargestCode<format>);
  const float scale = quotient > 0x1p-126f ? quotient : 0x1p-126f;
  const std::int64_t row = place.row * layout.row_bytes;
  if (layout.lane() == 0) {
    words[row / 4 + place.in_row] = finite ? __float_as_uint(scale) : kNan;
  }
  const Global<CodeWord<format>> own_codes = codes + first_code<format>(layout, place);
  // Codes go on to a multiple of 4 bytes: the last block's may need zeros.
  constexpr int kPerWord = 32 / kCodeBits<format>;
  const int filled = (count + kPerWord - 1) / kPerWord * kPerWord;
  each_four<KEPT>(layout, filled, [&](int i, int k) {
    if (KEPT == 0 || i >= count) kept[k] = load_four<T>(own, i, count, layout.packs);
    const auto index = first + static_cast<std::uint64_t>(from + i);
    const auto found = codes_of<format>(kept[k], scale, count - i, stochastic, start, index);
    own_codes[i / kFour] = finite ? found : CodeWord<format>{0};
  });
}

// A number of a block that is not finite: the NaN of torch, for the device's own has other bits.
template <typename T>
__device__ __forceinline__ T not_a_number() {
  if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(kNan);
  } else if constexpr (std::is_same_v<T, F16>) {
    return F16{0x7e00};
  } else {
    return Bf16{0x7fc0};
  }
}

// A code times the scale. A product of finite numbers does not become infinite by rounding.
template <typename T, std::int64_t format>
__device__ __forceinline__ T decoded(unsigned code, float scale) {
  const float product = __fmul_rn(value_of<format>(code), scale);
  const float bounded = product > kLargestFloat ? kLargestFloat : (product < -kLargestFloat ? -kLargestFloat : product);
  return scale != scale ? not_a_number<T>() : from_float<T>(bounded);
}

// scales and codes are the same memory.
template <typename T, std::int64_t format>
__global__ void __launch_bounds__(kQuantizeThreads)
    dequantize(Layout layout, Global<const float> scales, Global<const CodeWord<format>> codes, Global<T> x) {
  const std::int64_t number = layout.number();
  if (number >= layout.all_blocks) return;
  const BlockPlace place(number, layout);
  const Global<const CodeWord<format>> own_codes = codes + first_code<format>(layout, place);
  const Global<T> own = x + (place.row * layout.width + place.at);
  const float scale = scales[place.row * layout.row_bytes / 4 + place.in_row];
  each_four<0>(layout, place.count, [&](int i, int) {
    const unsigned word = static_cast<CodeWord<format>>(own_codes[i / kFour]);
    Pack<T, kFour> values;
#pragma unroll
    for (int n = 0; n < kFour; ++n) {
      const unsigned code = word >> n * kCodeBits<format> & ((1u << kCodeBits<format>) - 1u);
      values.at[n] = decoded<T, format>(code, scale);
    }
    if (layout.packs && i + kFour <= place.count) {
      store_pack<kFour>(own, i, values);
    } else {
#pragma unroll
      for (int n = 0; n < kFour; ++n) {
        if (i + n < place.count) own[i + n] = values.at[n];
      }
    }
  });
}

inline Layout layout_of(std::int64_t rows, std::int64_t width, std::int64_t block, std::int64_t format, bool fits) {
  const std::int64_t blocks = (width + block - 1) / block, per_word = format == kInt4 ? 8 : 4;
  int lanes = 2;
  while (lanes < kWarp && lanes * kFour < block) lanes *= 2;
  return {width, block, blocks, rows * blocks, 4 * (blocks + (width + per_word - 1) / per_word), lanes,
          fits && (rows == 1 || width % kFour == 0)};
}

// How many blocks of threads serve it, or 0 if a launch has not as many.
inline std::int64_t blocks_of_threads(const Layout& layout) {
  const std::int64_t groups = kQuantizeThreads / layout.lanes;
  const std::int64_t needed = (layout.all_blocks + groups - 1) / groups;
  return needed <= 2147483647 && layout.block <= 1 << 30 ? needed : 0;
}

template <typename Body>
int with_format(std::int64_t format, const Body& body) {
  switch (format) {
    case kInt8:
      return body(std::integral_constant<std::int64_t, kInt8>{});
    case kInt4:
      return body(std::integral_constant<std::int64_t, kInt4>{});
    case kFp8:
      return body(std::integral_constant<std::int64_t, kFp8>{});
    default:
      return 1;
  }
}

}  // namespace megazero

using namespace megazero;

// `start` is a key mixed by SplitMix64, `first` the number of x's first element in the stream that starts there; both
// matter only if `stochastic`. packed: on a multiple of 4 bytes.
extern "C" int megazero_cuda_quantize(std::int64_t dtype, std::int64_t rows, std::int64_t width, std::int64_t block,
                                      std::int64_t format, std::int64_t stochastic, std::int64_t start,
                                      std::int64_t first, const void* x, std::uint8_t* packed, void* stream) {
  if (rows == 0 || width == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const Layout layout = layout_of(rows, width, block, format, aligned(x, kFour * sizeof(T)));
    const std::int64_t needed = blocks_of_threads(layout);
    if (needed == 0) return 1;
    return with_format(format, [&](auto code) {
      const auto launch = [&](auto kept) {
        return MEGAZERO_LAUNCH((quantize<T, code(), kept()>), static_cast<unsigned>(needed), kQuantizeThreads, 0,
                               stream, layout, static_cast<const T*>(x), stochastic != 0,
                               static_cast<std::uint64_t>(start), static_cast<std::uint64_t>(first),
                               reinterpret_cast<std::uint32_t*>(packed),
                               reinterpret_cast<CodeWord<code()>*>(packed));
      };
      const bool fits = block <= kKept * kWarp * kFour;
      return fits ? launch(std::integral_constant<int, kKept>{}) : launch(std::integral_constant<int, 0>{});
    });
  });
}
MEGAZERO_EXPORT(quantize)

extern "C" int megazero_cuda_dequantize(std::int64_t dtype, std::int64_t rows, std::int64_t width, std::int64_t block,
                                        std::int64_t format, const std::uint8_t* packed, void* x, void* stream) {
  if (rows == 0 || width == 0) return 0;
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const Layout layout = layout_of(rows, width, block, format, aligned(x, kFour * sizeof(T)));
    const std::int64_t needed = blocks_of_threads(layout);
    if (needed == 0) return 1;
    return with_format(format, [&](auto code) {
      return MEGAZERO_LAUNCH((dequantize<T, code()>), static_cast<unsigned>(needed), kQuantizeThreads, 0, stream,
                             layout, reinterpret_cast<const float*>(packed),
                             reinterpret_cast<const CodeWord<code()>*>(packed), static_cast<T*>(x));
    });
  });
}
MEGAZERO_EXPORT(dequantize)
