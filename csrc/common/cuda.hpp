// What every kernel starts from: element types, memory, reductions and launches, spelled once for nvcc and for a C++
// compiler (common/cuda_on_cpu.h). A source csrc/*/cuda.cu includes this and nothing of CUDA's own.
//
// The ABI: `extern "C" int megazero_cuda_<name>(...)` takes device addresses, std::int64_t, double and a last `void*
// stream`, launches, and returns CUDA's error code (0: none). It allocates nothing and waits for nothing, so a CUDA
// graph can capture it. MEGAZERO_EXPORT(<name>) tells Python its parameters' types.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda_arguments.hpp"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "common/cuda_on_cpu.h"
#include "common/numbers.hpp"
#endif

namespace megazero {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Elements as they lie in memory; all arithmetic is done in float. The codes are those of megazero/ops/cuda.py.
#if defined(__CUDACC__)
struct F16 {
  std::uint16_t bits;
};

struct Bf16 {
  std::uint16_t bits;
};

// A pointer into device memory, and one to what many threads read and nobody writes, small enough to stay in the cache.
template <typename T>
using Global = T*;
template <typename T>
using Cached = const T* __restrict__;
#define MEGAZERO_ELEMENT(pointer) std::remove_const_t<std::remove_pointer_t<decltype(pointer)>>

// An array in a block's shared memory.
template <typename T>
class SharedArray {
 public:
  __device__ explicit SharedArray(void* data) : data_(static_cast<T*>(data)) {}
  __device__ __forceinline__ T& operator[](std::int64_t i) const { return data_[i]; }
  __device__ __forceinline__ T* get() const { return data_; }

 private:
  T* data_;
};

// N elements that cross the memory bus together.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<std::remove_const_t<T>, N> load_pack(T* from, std::int64_t i) {
  return *reinterpret_cast<const Pack<std::remove_const_t<T>, N>*>(from + i);
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T* to, std::int64_t i, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to + i) = pack;
}

// Begins to copy 16 bytes into shared memory, or zeros where it is not `real`; others go on beside it. `seal_copies` ends
// a batch of the thread's copies, and `wait_for_copies<N>` waits for all batches but its last N.
template <typename T>
__device__ __forceinline__ void begin_copy(const SharedArray<T>& to, std::int64_t at, const T* from, bool real) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to.get() + at));
  const int bytes = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void seal_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(F16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, F16>) {
    return F16{__half_as_ushort(__float2half_rn(x))};
  } else {
    return Bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
  }
}

// sums += left right, a warp's product of [16, 16] and [16, 8] in F16 or Bf16, laid out over lanes as PTX's mma.m16n8k16.
template <typename T>
__device__ __forceinline__ void warp_product(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
#define MEGAZERO_MMA(type)                                                                                        \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                             \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                             \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                       \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]))
  if constexpr (std::is_same_v<T, F16>) {
    MEGAZERO_MMA("f16");
  } else {
    MEGAZERO_MMA("bf16");
  }
#undef MEGAZERO_MMA
}

// MEGAZERO_SHARED(float, partials, 32) declares SharedArray<float> partials of 32 elements.
#define MEGAZERO_SHARED(type, name, count)            \
  __shared__ alignas(16) unsigned char name##_bytes[sizeof(type) * (count)]; \
  const ::megazero::SharedArray<type> name(name##_bytes)
#define MEGAZERO_DYNAMIC_SHARED(type, name)                    \
  extern __shared__ __align__(16) unsigned char megazero_dynamic[]; \
  const ::megazero::SharedArray<type> name(megazero_dynamic)

// MEGAZERO_LAUNCH((kernel<T, 4>), blocks, threads, shared_bytes, stream, arguments...) is CUDA's error code.
#define MEGAZERO_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  ::megazero::launch(MEGAZERO_NAMED kernel, blocks, threads, shared_bytes, stream, __VA_ARGS__)
#define MEGAZERO_NAMED(...) __VA_ARGS__

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::size_t shared_bytes, void* stream,
           Arguments... arguments) {
  if (!(holds<Parameters>(arguments) && ...)) return kInvalidValue;
  if (shared_bytes > (48u << 10)) {  // more must be asked for
    const auto bytes = static_cast<int>(shared_bytes);
    const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return static_cast<int>(code);
  }
  kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(static_cast<Parameters>(arguments)...);
  return static_cast<int>(cudaGetLastError());
}
#else
using F16 = Fp16;

inline float to_float(float x) { return x; }
inline float to_float(F16 x) { return load(&x); }
inline float to_float(Bf16 x) { return load(&x); }

template <typename T>
T from_float(float x) {
  T to;
  store(x, &to);
  return to;
}

// The same product by plain arithmetic: lanes lay their factors beside each other in memory of lane 0.
template <typename T>
void warp_product(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2], MEGAZERO_SITE_PARAMETER) {
  using namespace on_cpu;
  struct Factors {
    unsigned left[kWarp][4], right[kWarp][2];
  } own;
  const auto at = reinterpret_cast<std::uint64_t>(&own);
  auto& all = *reinterpret_cast<Factors*>(exchange(Warp::kShuffle, kAllLanes, at, 0, site));
  const unsigned lane = place().thread.x % kWarp;
  std::copy_n(left, 4, all.left[lane]);
  std::copy_n(right, 2, all.right[lane]);
  exchange(Warp::kSync, kAllLanes, 0, 0, site);
  const auto number = [](const unsigned* words, unsigned k) {
    const T value{static_cast<std::uint16_t>(words[k / 8 % 2] >> k % 2 * 16)};
    return to_float(value);
  };
  for (unsigned e = 0; e < 4; ++e) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + e % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned* a = all.left[row * 4 + k % 8 / 2];
      const unsigned words[2] = {a[e / 2], a[e / 2 + 2]};
      sums[e] += number(words, k) * number(all.right[column * 4 + k % 8 / 2], k);
    }
  }
  exchange(Warp::kSync, kAllLanes, 0, 0, site);
}

#define MEGAZERO_SHARED(type, name, count) \
  static const char name##_key = 0;        \
  const ::megazero::SharedArray<type> name(::megazero::on_cpu::shared_array(&name##_key, sizeof(type) * (count)))
#define MEGAZERO_DYNAMIC_SHARED(type, name) \
  const ::megazero::SharedArray<type> name(::megazero::on_cpu::dynamic_shared())
#define MEGAZERO_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  ((void)(stream), ::megazero::launch_on_cpu(#kernel, MEGAZERO_NAMED kernel, blocks, threads, shared_bytes, __VA_ARGS__))
#define MEGAZERO_NAMED(...) __VA_ARGS__
#endif

// Calls body with an element of the type with that code; 1 ("invalid value") for another code.
template <typename Body>
int with_element(std::int64_t dtype, const Body& body) {
  switch (dtype) {
    case 0:
      return body(float{});
    case 1:
      return body(F16{});
    case 2:
      return body(Bf16{});
    default:
      return 1;
  }
}

// Calls body with an element of a matrix and one of what goes with it: of the same type, or float.
template <typename Body>
int with_elements(std::int64_t dtype, std::int64_t other, const Body& body) {
  return with_element(dtype, [&](auto element) {
    return other == dtype ? body(element, element) : other == 0 ? body(element, float{}) : 1;
  });
}

inline int ceil_div(std::int64_t a, std::int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Whether the address allows accesses of that many bytes.
inline bool aligned(const void* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

// The sum over a warp, in every lane: each lane adds the same numbers in the same order, so all get the same bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// The largest over a warp, in every lane; NaN if any lane has NaN.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, value, distance);
    value = (other > value || other != other) ? other : value;
  }
  return value;
}

// Tells Python the parameters' types of a function of the ABI: p for an address, i for an integer, d for a double.
template <typename T>
constexpr char letter_of() {
  if constexpr (std::is_pointer_v<T>) {
    return 'p';
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return 'i';
  } else {
    static_assert(std::is_same_v<T, double>, "the ABI knows addresses, std::int64_t and double");
    return 'd';
  }
}

template <typename... Parameters>
struct Signature {
  char letters[sizeof...(Parameters) + 1] = {letter_of<Parameters>()..., '\0'};
};

template <typename... Parameters>
const char* signature_of(int (*)(Parameters...)) {
  static const Signature<Parameters...> signature;
  return signature.letters;
}

}  // namespace megazero

#define MEGAZERO_EXPORT(name)                                    \
  extern "C" const char* megazero_cuda_##name##_signature() {    \
    return ::megazero::signature_of(&megazero_cuda_##name);      \
  }
