#include "mpu/reduce.hpp"

#include <algorithm>
#include <stdexcept>

#include "common/clones.hpp"
#include "common/numbers.hpp"

namespace megazero::mpu {
namespace {

struct Half {
  std::uint16_t bits;
};

// Arithmetic is done in the type that wide() returns; narrow() converts back.
template <typename T>
MEGAZERO_INLINE T wide(T value) {
  return value;
}
MEGAZERO_INLINE float wide(Bf16 value) { return load(&value); }

// A multiplication rebases the exponent, which is right for denormals too; infinity and NaN come out as 2^16 or more,
// and are then given their proper exponent.
MEGAZERO_INLINE float wide(Half value) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  const float finite = bits_as<float>(magnitude) * 0x1p112f;
  const std::uint32_t rebased = bits_as<std::uint32_t>(finite) | (finite >= 0x1p16f ? 0x7f800000u : 0u);
  return bits_as<float>(rebased | static_cast<std::uint32_t>(value.bits & 0x8000u) << 16);
}

template <typename T>
MEGAZERO_INLINE void narrow(T value, T* to) {
  *to = value;
}
MEGAZERO_INLINE void narrow(float value, Bf16* to) { store(value, to); }

// Normal numbers are rounded on their bits, as bf16 is; for the rest, adding 1/2 shifts the significand to where its
// unit is that of fp16's denormals, and the addition rounds.
MEGAZERO_INLINE void narrow(float value, Half* to) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t denormal = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t result = magnitude >= 0x477ff000u ? special : finite;
  to->bits = static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000u));
}

struct Sum {
  template <typename W>
  static MEGAZERO_INLINE W combine(W a, W b) {
    return static_cast<W>(a + b);
  }
};
struct Max {
  template <typename W>
  static MEGAZERO_INLINE W combine(W a, W b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <typename W>
  static MEGAZERO_INLINE W combine(W a, W b) {
    return a < b || a != a ? a : b;
  }
};

template <typename T, typename Op>
MEGAZERO_CLONES void reduce_two(const T* a, const T* b, T* out, std::int64_t elements) {
#pragma omp simd
  for (std::int64_t i = 0; i < elements; ++i) narrow(Op::combine(wide(a[i]), wide(b[i])), out + i);
}

constexpr std::int64_t kBlock = 1024;

template <typename T, typename Op>
MEGAZERO_CLONES void reduce_block(const T* const* sources, int count, std::int64_t at, T* out, std::int64_t elements) {
  decltype(wide(T{})) total[kBlock];
#pragma omp simd
  for (std::int64_t i = 0; i < elements; ++i) total[i] = wide(sources[0][at + i]);
  for (int s = 1; s < count; ++s) {
    const T* source = sources[s] + at;
#pragma omp simd
    for (std::int64_t i = 0; i < elements; ++i) total[i] = Op::combine(total[i], wide(source[i]));
  }
#pragma omp simd
  for (std::int64_t i = 0; i < elements; ++i) narrow(total[i], out + at + i);
}

template <typename T, typename Op>
void reduce(const void* const* sources, int count, void* out, std::int64_t elements) {
  const auto* from = reinterpret_cast<const T* const*>(sources);
  if (count == 2) {
    reduce_two<T, Op>(from[0], from[1], static_cast<T*>(out), elements);
    return;
  }
  for (std::int64_t at = 0; at < elements; at += kBlock) {
    reduce_block<T, Op>(from, count, at, static_cast<T*>(out), std::min(kBlock, elements - at));
  }
}

template <typename T, typename ForSum = Sum>
Element element(const std::string& reduction) {
  if (reduction == "sum") return {sizeof(T), &reduce<T, ForSum>};
  if (reduction == "max") return {sizeof(T), &reduce<T, Max>};
  if (reduction == "min") return {sizeof(T), &reduce<T, Min>};
  throw std::invalid_argument("`reduction` must be sum, max or min, but is " + reduction);
}

}  // namespace

Element element_of(const std::string& dtype, const std::string& reduction) {
  if (dtype == "float32") return element<float>(reduction);
  if (dtype == "bfloat16") return element<Bf16>(reduction);
  if (dtype == "float16") return element<Half>(reduction);
  if (dtype == "float64") return element<double>(reduction);
  if (dtype == "int64") return element<std::int64_t>(reduction);
  if (dtype == "int32") return element<std::int32_t>(reduction);
  if (dtype == "int16") return element<std::int16_t>(reduction);
  if (dtype == "int8") return element<std::int8_t>(reduction);
  if (dtype == "uint8") return element<std::uint8_t>(reduction);
  if (dtype == "bool") return element<std::uint8_t, Max>(reduction);
  throw std::invalid_argument("`dtype` must be one that can be reduced here, but is " + dtype);
}

}  // namespace megazero::mpu
