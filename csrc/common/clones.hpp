// One build for every x86-64: a function marked MEGAZERO_CLONES is compiled for the baseline, for AVX2 and for
// AVX-512, and the dynamic linker picks one when the module loads. What it calls must be MEGAZERO_INLINE, so that it
// is compiled again inside each clone; calls from outside (lambdas, parallel regions) go through the picked pointer.
#pragma once

#include <cstdint>  // defines __GLIBC__ where glibc is used: picking a clone at load time (ifunc) is its feature

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGAZERO_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MEGAZERO_CLONES
#endif

#define MEGAZERO_INLINE inline __attribute__((always_inline))
#define MEGAZERO_INLINE_LAMBDA __attribute__((always_inline))
