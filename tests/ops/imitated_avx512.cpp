// The paths of csrc/coded_linear for AVX-512 and VNNI on a processor that has AVX2 alone: vectors of 64 bytes are
// two registers, and the instructions of VNNI are functions.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/targets.hpp"

#undef MEGAZERO_AVX512
#define MEGAZERO_AVX512 MEGAZERO_AVX2
#define MEGAZERO_VNNI MEGAZERO_AVX2

namespace imitated {

struct Wide {
  alignas(64) std::int32_t lanes[16];
};

inline Wide load(const void* from) {
  Wide wide;
  std::memcpy(wide.lanes, from, sizeof(wide.lanes));
  return wide;
}

inline void store(void* to, const Wide& wide) { std::memcpy(to, wide.lanes, sizeof(wide.lanes)); }

inline Wide zeros() { return Wide{}; }

inline Wide all(std::int32_t value) {
  Wide wide;
  for (auto& lane : wide.lanes) lane = value;
  return wide;
}

inline Wide all_bytes(char value) { return all(0x01010101 * static_cast<std::uint8_t>(value)); }

inline Wide less(const Wide& a, const Wide& b) {
  Wide wide;
  for (int i = 0; i < 16; ++i) wide.lanes[i] = a.lanes[i] - b.lanes[i];
  return wide;
}

// vpdpbusd: four products of unsigned bytes of a with signed bytes of b are added to each lane.
inline Wide dot(const Wide& sum, const Wide& a, const Wide& b) {
  Wide wide = sum;
  for (int i = 0; i < 16; ++i) {
    for (int byte = 0; byte < 4; ++byte) {
      const auto left = static_cast<std::uint8_t>(a.lanes[i] >> (8 * byte));
      const auto right = static_cast<std::int8_t>(b.lanes[i] >> (8 * byte));
      wide.lanes[i] += static_cast<std::int32_t>(left) * right;
    }
  }
  return wide;
}

}  // namespace imitated

#define __m512i imitated::Wide
#define _mm512_loadu_si512 imitated::load
#define _mm512_storeu_si512 imitated::store
#define _mm512_setzero_si512 imitated::zeros
#define _mm512_set1_epi8 imitated::all_bytes
#define _mm512_set1_epi32 imitated::all
#define _mm512_sub_epi32 imitated::less
#define _mm512_dpbusd_epi32 imitated::dot

#include "coded_linear/cpu.cpp"

extern "C" {

void imitated_coded(std::int64_t rows, std::int64_t width, std::int64_t depth, std::int64_t group, std::int64_t bits,
                    const float* x, const std::int32_t* codes, const float* scales, const float* bias, float* y) {
  using namespace megazero;
  const Call call{rows, width, depth, group, x, codes, scales, bias, y};
  const auto work = bits == 8 ? work_of<8>(CodedPath::avx512) : work_of<4>(CodedPath::avx512);
  work(call, 0, (width + kPanel - 1) / kPanel);
}

void imitated_integers(std::int64_t rows, std::int64_t width, std::int64_t depth, const float* x,
                       const std::int32_t* codes, const float* scales, const float* bias, float* y) {
  using namespace megazero;
  const IntegerCall call{rows, width, depth, codes, nullptr, scales, bias, y};
  integer_linear<VnniIntegers>(call, 1, x, nullptr);
}
}
