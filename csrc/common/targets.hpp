// Instruction sets for code whose tiles must fit the registers, which MEGAZERO_CLONES cannot express: there, one source
// is compiled for each set; here, each has its own tile. A wrapper for each set calls one template that is
// MEGAZERO_INLINE, and `instruction_set` says which of them this processor runs.
#pragma once

#include "common/clones.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGAZERO_HAS_TARGETS 1
#define MEGAZERO_AVX2 __attribute__((target("arch=x86-64-v3")))
#define MEGAZERO_AVX512 __attribute__((target("arch=x86-64-v4")))
#else
#define MEGAZERO_HAS_TARGETS 0
#define MEGAZERO_AVX2
#define MEGAZERO_AVX512
#endif

namespace megazero {

enum class InstructionSet { baseline, avx2, avx512 };  // in rising order

inline InstructionSet instruction_set() {
#if MEGAZERO_HAS_TARGETS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    return InstructionSet::avx2;
  }
#endif
  return InstructionSet::baseline;
}

}  // namespace megazero
