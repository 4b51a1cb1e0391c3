#include "coded_linear/cpu.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "coded_linear/decode.hpp"
#include "coded_linear/integers.hpp"
#include "common/numbers.hpp"
#include "common/parallel.hpp"
#include "linear/rows.hpp"

namespace megazero {
namespace {

using namespace coded;

struct Call {
  std::int64_t rows, width, depth, group;
  const float* x;
  const std::int32_t* codes;
  const float *scales, *bias;
  float* y;
};

// The sums of some rows and columns begin as the bias, or zeros, and end in y; they are [rows, columns].
MEGAZERO_INLINE void begin(const Call& call, std::int64_t rows, std::int64_t first, std::int64_t columns, float* sums) {
  const std::int64_t used = call.bias == nullptr ? 0 : std::min(columns, call.width - first);
  for (std::int64_t i = 0; i < rows; ++i, sums += columns) {
    for (std::int64_t j = 0; j < columns; ++j) sums[j] = j < used ? call.bias[first + j] : 0.0f;
  }
}

MEGAZERO_INLINE void finish(const Call& call, std::int64_t at, std::int64_t rows, std::int64_t first,
                            std::int64_t columns, const float* sums) {
  const std::int64_t used = std::min(columns, call.width - first);
  for (std::int64_t i = at; i < at + rows; ++i, sums += columns) {
    std::copy_n(sums, used, call.y + i * call.width + first);
  }
}

// Few rows and panels, whose sums are in registers, where codes become floats.
template <typename Set, int Rows, int Panels>
MEGAZERO_INLINE void few_rows(const Call& call, std::int64_t at, std::int64_t panel) {
  using Vector = typename Set::Vector;
  constexpr int all = Panels * Set::vectors;
  const std::int64_t stride = call.depth / Set::run * kPanel, scales_stride = call.depth / call.group * kPanel;
  const std::int32_t* codes = call.codes + panel * stride;
  const float *scales = call.scales + panel * scales_stride, *x = call.x + at * call.depth;
  alignas(64) float sums[Rows * Panels * kPanel];
  begin(call, Rows, panel * kPanel, Panels * kPanel, sums);
  Vector total[Rows][all];
  auto* memory = reinterpret_cast<Vector*>(sums);
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < all; ++j) total[i][j] = memory[i * all + j];
  }
  for (std::int64_t k = 0; k < call.depth; scales += kPanel) {
    Vector own[all];
#pragma GCC unroll 16
    for (int j = 0; j < all; ++j) own[j] = Set::uppermost(scales + j / Set::vectors * scales_stride, j % Set::vectors);
    for (const std::int64_t end = k + call.group; k < end; k += Set::run, codes += kPanel) {
      // A panel is too short for a processor to see where it goes on.
      for (int of = 0; of < Panels; ++of) __builtin_prefetch(codes + (of + Panels) * stride);
#pragma GCC unroll 8
      for (int place = 0; place < Set::run; ++place) {
#pragma GCC unroll 16
        for (int j = 0; j < all; ++j) {
          const std::int64_t of = j / Set::vectors, part = j % Set::vectors;
          Vector weight;
          if constexpr (Rows == 1) {
            Set::decode(codes + of * stride, own[j], part, place, weight);
          } else {  // here a mask would take a register that a sum needs
            Set::decode(codes + of * stride, scales + of * scales_stride, part, place, weight);
          }
#pragma GCC unroll 4
          for (int i = 0; i < Rows; ++i) total[i][j] += x[i * call.depth + k + place] * weight;
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < all; ++j) memory[i * all + j] = total[i][j];
  }
  finish(call, at, Rows, panel * kPanel, Panels * kPanel, sums);
}

// Many rows: a block of a panel becomes floats, and all rows pass by.
template <typename Set, int Rows>
MEGAZERO_INLINE void many_rows(const Call& call, std::int64_t panel) {
  using Vector = typename Set::Vector;
  constexpr std::int64_t most = 64;  // rows whose sums are kept
  alignas(64) float block[kDepth * kPanel], sums[most * kPanel];
  const std::int32_t* codes = call.codes + panel * (call.depth / Set::run) * kPanel;
  const float* scales = call.scales + panel * (call.depth / call.group) * kPanel;
  for (std::int64_t at = 0; at < call.rows; at += most) {
    const std::int64_t rows = std::min(most, call.rows - at);
    begin(call, rows, panel * kPanel, kPanel, sums);
    for (std::int64_t k = 0; k < call.depth; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, call.depth - k);
      auto* to = reinterpret_cast<Vector*>(block);
      for (std::int64_t d = k; d < k + depth; d += Set::run) {
        const float* scale = scales + d / call.group * kPanel;
#pragma GCC unroll 8
        for (int place = 0; place < Set::run; ++place) {
#pragma GCC unroll 4
          for (int j = 0; j < Set::vectors; ++j) {
            Set::decode(codes + d / Set::run * kPanel, scale, j, place, *to++);
          }
        }
      }
      add_rows<typename Set::Floats, Rows>(rows, call.x + at * call.depth + k, call.depth, block, depth, sums, kPanel);
    }
    finish(call, at, rows, panel * kPanel, kPanel, sums);
  }
}

// Whether all scales of panels [begin, end) are 0, or large enough to stay exact when divided by 2^28.
MEGAZERO_INLINE bool divisible(const Call& call, std::int64_t begin, std::int64_t end) {
  constexpr std::int32_t least = (127 - 126 + 28) << 23;  // the bits of 2^-98
  const std::int64_t panel = call.depth / call.group * kPanel;
  std::int32_t small = 0;
  for (std::int64_t i = begin * panel; i < end * panel; ++i) {
    const std::int32_t bits = bits_as<std::int32_t>(call.scales[i]) & 0x7fffffff;
    small |= (bits != 0) & (bits < least);
  }
  return small == 0;
}

// Panels [begin, end).
template <typename Set, int Rows>
MEGAZERO_INLINE void panels(const Call& call, std::int64_t begin, std::int64_t end) {
  if (call.rows > 2 || !divisible(call, begin, end)) {
    for (; begin < end; ++begin) many_rows<Set, Rows>(call, begin);
    return;
  }
  constexpr int few = 4 / Set::vectors;
  for (; begin + few <= end && call.rows == 1; begin += few) few_rows<Set, 1, few>(call, 0, begin);
  for (; begin + 2 <= end && call.rows == 2; begin += 2) few_rows<Set, 2, 2>(call, 0, begin);
  for (; begin < end; ++begin) {
    for (std::int64_t i = 0; i < call.rows; ++i) few_rows<Set, 1, 1>(call, i, begin);
  }
}

template <int Bits>
void panels_baseline(const Call& call, std::int64_t begin, std::int64_t end) {
  panels<Codes<Lanes4, Bits>, 2>(call, begin, end);
}

template <int Bits>
MEGAZERO_AVX2 void panels_avx2(const Call& call, std::int64_t begin, std::int64_t end) {
  panels<Codes<Lanes8, Bits>, 6>(call, begin, end);
}

template <int Bits>
MEGAZERO_AVX512 void panels_avx512(const Call& call, std::int64_t begin, std::int64_t end) {
  panels<Codes<Lanes16, Bits>, 8>(call, begin, end);
}

template <int Bits>
auto work_of(CodedPath path) {
  return path >= CodedPath::avx512 ? &panels_avx512<Bits>
         : path == CodedPath::avx2 ? &panels_avx2<Bits>
                                   : &panels_baseline<Bits>;
}

struct IntegerCall {
  std::int64_t rows, width, depth;
  const std::int32_t* codes;
  const float *row_scales, *scales, *bias;
  float* y;
};

// The largest magnitude, which as an integer orders floats as they are, and NaN above all.
MEGAZERO_CLONES float greatest_of(const float* x, std::int64_t depth) {
  std::int32_t most = 0;
  for (std::int64_t k = 0; k < depth; ++k) most = std::max(most, bits_as<std::int32_t>(x[k]) & 0x7fffffff);
  return bits_as<float>(most);
}

// Codes of a row; adding and taking off 1.5 2^23 rounds to even.
template <typename Code>
MEGAZERO_INLINE void round_row(const float* x, std::int64_t depth, float scale, float offset, Code* codes) {
  constexpr float whole = 12582912.0f;
  for (std::int64_t k = 0; k < depth; ++k) {
    const float code = (x[k] / scale + whole) - whole;
    codes[k] = static_cast<Code>(static_cast<std::int32_t>(std::min(std::max(code, -128.0f), 127.0f) + offset));
  }
}

MEGAZERO_CLONES void round_row_of(const float* x, std::int64_t depth, float scale, std::int16_t* codes) {
  round_row(x, depth, scale, 0.0f, codes);
}

MEGAZERO_CLONES void round_row_of(const float* x, std::int64_t depth, float scale, std::uint8_t* codes) {
  round_row(x, depth, scale, 128.0f, codes);
}

template <typename Path>
void integer_panels(const IntegerCall& call, const typename Path::Code* x, std::int64_t begin, std::int64_t end) {
  std::int32_t sums[Path::rows * kPanel];
  for (std::int64_t panel = begin; panel < end; ++panel) {
    const std::int64_t first = panel * kPanel, used = std::min(kPanel, call.width - first);
    const auto* codes = reinterpret_cast<const std::int8_t*>(call.codes) + panel * call.depth * kPanel;
    for (std::int64_t at = 0; at < call.rows;) {
      const std::int64_t rows = at + Path::rows <= call.rows ? Path::rows : 1;
      const auto* from = x + at * call.depth;
      if (rows == 1) {
        Path::template tile<1>(from, call.depth, codes, call.depth / 4, sums);
      } else {
        Path::template tile<Path::rows>(from, call.depth, codes, call.depth / 4, sums);
      }
      for (std::int64_t i = 0; i < rows; ++i, ++at) {
        for (std::int64_t j = 0; j < used; ++j) {
          const float scale = call.row_scales[at] * call.scales[first + j];
          const float bias = call.bias == nullptr ? 0.0f : call.bias[first + j];
          call.y[at * call.width + first + j] = static_cast<float>(sums[i * kPanel + j]) * scale + bias;
        }
      }
    }
  }
}

template <typename Path>
void integer_linear(IntegerCall call, std::int64_t threads, const float* x, const float* greatest) {
  std::vector<typename Path::Code> codes(static_cast<std::size_t>(call.rows * call.depth));
  std::vector<float> scales(static_cast<std::size_t>(call.rows));
  const int workers = workers_for(call.rows, call.depth, threads);
  parallel_for(call.rows, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t i = begin; i < end; ++i) {
      const float* row = x + i * call.depth;
      const float most = greatest == nullptr ? greatest_of(row, call.depth) : greatest[i];
      scales[i] = most > 0.0f ? most / 127.5f : 1.0f;
      if (most <= std::numeric_limits<float>::max()) {
        round_row_of(row, call.depth, scales[i], codes.data() + i * call.depth);
      } else {
        scales[i] = std::numeric_limits<float>::quiet_NaN();  // codes stay zeros
      }
    }
  });
  call.row_scales = scales.data();
  const std::int64_t count = (call.width + kPanel - 1) / kPanel;
  parallel_for(count, workers_for(count, call.rows * call.depth, threads),
               [&](std::int64_t begin, std::int64_t end, std::int64_t) {
                 integer_panels<Path>(call, codes.data(), begin, end);
               });
}

}  // namespace
}  // namespace megazero

void megazero_coded_linear(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t group,
                           std::int64_t bits, std::int64_t threads, const float* x, const std::int32_t* codes,
                           const float* scales, const float* bias, float* y, megazero::CodedPath most) {
  using namespace megazero;
  const Call call{rows, width, depth, group, x, codes, scales, bias, y};
  const CodedPath path = std::min(most, coded_path());
  const auto work = bits == 8 ? work_of<8>(path) : work_of<4>(path);
  const std::int64_t count = (width + kPanel - 1) / kPanel;
  parallel_for(count, workers_for(count, rows * depth, threads),
               [&](std::int64_t begin, std::int64_t end, std::int64_t) { work(call, begin, end); });
}

void megazero_integer_linear(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t threads,
                             const float* x, const float* greatest, const std::int32_t* codes, const float* scales,
                             const float* bias, float* y, megazero::CodedPath most) {
  using namespace megazero;
  const IntegerCall call{rows, width, depth, codes, nullptr, scales, bias, y};
  const CodedPath path = std::min(most, coded_path());
  const auto work = path == CodedPath::avx512_vnni ? &integer_linear<VnniIntegers>
                    : path >= CodedPath::avx2      ? &integer_linear<Avx2Integers>
                                                   : &integer_linear<PlainIntegers>;
  work(call, threads, x, greatest);
}
