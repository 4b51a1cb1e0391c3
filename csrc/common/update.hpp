// One pass of an optimizer over memory: gradients as they are stored, fp32 masters and moments in place, and the
// weights that the model uses. An element's result depends on that element alone, to the last bit: all elements go
// through the same instructions in blocks of one size, the last few in a copy that is filled up with zeros.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/clones.hpp"
#include "common/numbers.hpp"
#include "common/parallel.hpp"

namespace megazero {

enum class ElementKind : std::int64_t { none, fp32, bf16, fp16 };

// What is around masters and moments in a pass over `count` elements.
struct UpdatePass {
  std::int64_t count;
  std::int64_t threads;
  const void* grads;
  ElementKind grad_kind;
  float grad_scale;
  void* weights;  // written only; unused if weight_kind is none
  ElementKind weight_kind;
};

// Measured: larger blocks read in bursts, smaller ones pay for the switches between them.
constexpr std::int64_t kUpdateBlock = 128;

// Passes of so many elements flow through all caches; weights then go around them, which saves reading the lines that
// are overwritten.
constexpr std::int64_t kStreamed = 1 << 22;
constexpr std::int64_t kLine = 64;

template <typename T>
MEGAZERO_INLINE void widen(const void* from, std::int64_t at, std::int64_t count, float scale, float* to) {
  const T* elements = static_cast<const T*>(from) + at;
  if (count == kUpdateBlock) {
#pragma omp simd
    for (std::int64_t i = 0; i < kUpdateBlock; ++i) {
      to[i] = load(elements + i) * scale;
    }
    return;
  }
  for (std::int64_t i = 0; i < kUpdateBlock; ++i) {
    to[i] = i < count ? load(elements + i) * scale : 0.0f;
  }
}

// Scaled gradients, each rounded to fp32 before it is used.
MEGAZERO_INLINE void read_gradients(const UpdatePass& pass, std::int64_t at, std::int64_t count, float* to) {
  switch (pass.grad_kind) {
    case ElementKind::bf16:
      return widen<Bf16>(pass.grads, at, count, pass.grad_scale, to);
    case ElementKind::fp16:
      return widen<Fp16>(pass.grads, at, count, pass.grad_scale, to);
    default:
      return widen<float>(pass.grads, at, count, pass.grad_scale, to);
  }
}

template <typename T>
MEGAZERO_INLINE void narrow(const float* from, void* to, std::int64_t at, std::int64_t count) {
  T* elements = static_cast<T*>(to) + at;
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    store(from[i], elements + i);
  }
}

#if defined(__SSE2__)
// A whole block of elements of two bytes to an address that is a multiple of a cache line.
template <typename T>
MEGAZERO_INLINE void stream(const float* from, void* to, std::int64_t at) {
  static_assert(sizeof(T) == 2, "as many elements as fit a vector");
  alignas(kLine) T narrowed[kUpdateBlock];
  narrow<T>(from, narrowed, 0, kUpdateBlock);
  const __m128i* source = reinterpret_cast<const __m128i*>(narrowed);
  __m128i* target = reinterpret_cast<__m128i*>(static_cast<T*>(to) + at);
  for (std::int64_t i = 0; i < kUpdateBlock / 8; ++i) {
    _mm_stream_si128(target + i, _mm_load_si128(source + i));
  }
}
#endif

template <typename T>
MEGAZERO_INLINE void write_narrow(const UpdatePass& pass, const float* from, std::int64_t at, std::int64_t count) {
#if defined(__SSE2__)
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(static_cast<T*>(pass.weights) + at);
  if (pass.count >= kStreamed && count == kUpdateBlock && address % kLine == 0) {
    return stream<T>(from, pass.weights, at);
  }
#endif
  narrow<T>(from, pass.weights, at, count);
}

MEGAZERO_INLINE void write_weights(const UpdatePass& pass, const float* from, std::int64_t at, std::int64_t count) {
  switch (pass.weight_kind) {
    case ElementKind::fp32:
      return narrow<float>(from, pass.weights, at, count);
    case ElementKind::bf16:
      return write_narrow<Bf16>(pass, from, at, count);
    case ElementKind::fp16:
      return write_narrow<Fp16>(pass, from, at, count);
    default:
      return;
  }
}

// Elements of the first block from `begin` on: up to a multiple of a cache line of the weights.
MEGAZERO_INLINE std::int64_t first_block(const UpdatePass& pass, std::int64_t begin) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pass.weights) + 2 * begin;
  const std::int64_t lead = static_cast<std::int64_t>((kLine - address % kLine) % kLine / 2);
  const bool narrows = pass.weight_kind == ElementKind::bf16 || pass.weight_kind == ElementKind::fp16;
  return narrows && lead > 0 ? lead : kUpdateBlock;
}

// Streamed weights become visible to other threads in order.
MEGAZERO_INLINE void finish_writes() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A block of an array: where it is if it is whole, else in a copy.
class Borrowed {
 public:
  MEGAZERO_INLINE Borrowed(float* from, float* copy, std::int64_t count)
      : from_(from), at_(count < kUpdateBlock ? copy : from), count_(count) {
    if (at_ != from_) {
      for (std::int64_t i = 0; i < kUpdateBlock; ++i) {
        at_[i] = i < count ? from[i] : 0.0f;
      }
    }
  }

  MEGAZERO_INLINE float* at() const { return at_; }

  MEGAZERO_INLINE void give_back() const {
    if (at_ != from_) {
      for (std::int64_t i = 0; i < count_; ++i) {
        from_[i] = at_[i];
      }
    }
  }

 private:
  float* from_;
  float* at_;
  std::int64_t count_;
};

// The elements from begin to end; `rule(p, g)`, `rule(p, g, m)` or `rule(p, g, m, v)` moves one of them.
template <typename Rule, typename... Moments>
MEGAZERO_CLONES void update_range(UpdatePass pass, Rule rule, std::int64_t begin, std::int64_t end, float* p,
                                  Moments*... moments) {
  alignas(64) float grads[kUpdateBlock];
  alignas(64) float copies[3][kUpdateBlock];
  std::int64_t count = first_block(pass, begin);
  for (std::int64_t at = begin; at < end; at += count, count = kUpdateBlock) {
    count = std::min(count, end - at);
    read_gradients(pass, at, count, grads);
    const Borrowed weights(p + at, copies[0], count);
    float* block = weights.at();
    if constexpr (sizeof...(Moments) == 0) {
#pragma omp simd
      for (std::int64_t i = 0; i < kUpdateBlock; ++i) {
        rule(block[i], grads[i]);
      }
    } else if constexpr (sizeof...(Moments) == 1) {
      const Borrowed first(moments + at..., copies[1], count);
      float* m = first.at();
#pragma omp simd
      for (std::int64_t i = 0; i < kUpdateBlock; ++i) {
        rule(block[i], grads[i], m[i]);
      }
      first.give_back();
    } else {
      float* const bases[] = {moments...};
      const Borrowed first(bases[0] + at, copies[1], count);
      const Borrowed second(bases[1] + at, copies[2], count);
      float* m = first.at();
      float* v = second.at();
#pragma omp simd
      for (std::int64_t i = 0; i < kUpdateBlock; ++i) {
        rule(block[i], grads[i], m[i], v[i]);
      }
      first.give_back();
      second.give_back();
    }
    write_weights(pass, block, at, count);
    weights.give_back();
  }
  finish_writes();
}

// The words of csrc/update/rules.hpp. The compiler chooses what is rounded once, where the CPU can do that.
#define MEGAZERO_RULE MEGAZERO_INLINE

MEGAZERO_RULE float fused(float a, float b, float c) { return a * b + c; }

MEGAZERO_RULE float sum_rounding_first(float a, float x, float b, float y) { return a * x + b * y; }

MEGAZERO_RULE float sum_rounding_second(float a, float x, float b, float y) { return a * x + b * y; }

MEGAZERO_RULE float over_root(float x, float square, float eps) { return x / (std::sqrt(square) + eps); }

MEGAZERO_RULE float moved_towards(float m, float x, float share) { return m + share * (x - m); }

MEGAZERO_RULE float decayed_gradient(float g, float p, float decay) { return decay != 0.0f ? g + decay * p : g; }

// A pass over all elements, divided among the threads.
template <typename Rule, typename... Moments>
void update_all(const UpdatePass& pass, const Rule& rule, float* p, Moments*... moments) {
  const int workers = workers_for(pass.count, 1, pass.threads);
  parallel_for(pass.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    update_range(pass, rule, begin, end, p, moments...);
  });
}

}  // namespace megazero
