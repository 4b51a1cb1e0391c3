// CUDA for a C++ compiler: what a kernel of csrc/*/cuda.cu uses, run on the CPU and watched.
//
// A block's threads are fibers that take turns; they give way at barriers and at warp operations only, in an order that
// the caller chooses. Memory of the device and of a block is reached through the types Global and SharedArray, which
// tell the watch (cuda_on_cpu.cpp) what is read and written. The watch counts bytes, 32-byte sectors and bank
// conflicts, and finds races, accesses out of bounds, reads of what nobody wrote, and barriers that only some threads
// reach.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cuda_arguments.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace megazero::on_cpu {

// A line of source. Accesses of a warp's lanes belong together if they are the same execution of the same line.
struct Site {
  const char* file;
  int line;
};

// Where the running thread is in its grid.
struct Place {
  dim3 thread, block, threads, blocks;
};

// A cached read is one of memory that the device's cache holds: it counts once per launch.
enum class Access { kRead, kCachedRead, kWrite, kAtomic };
enum class Warp { kShuffle, kShuffleXor, kShuffleDown, kShuffleUp, kBallot, kSync };

const Place& place();
void touch_global(const void* address, std::size_t bytes, Access access, Site site);
void touch_shared(const void* address, std::size_t bytes, Access access, Site site);
void wait_for_block(Site site);
// A fence of the running thread, and an addition to a counter at which blocks arrive.
void fence();
void arrive(const void* counter);
// Waits for the lanes in mask; `operand` is the lane, the distance or the vote. Returns what this lane receives.
std::uint64_t exchange(Warp kind, unsigned mask, std::uint64_t value, int operand, Site site);
// The running thread's copies into shared memory; from nowhere come zeros.
void begin_copy(void* to, const void* from, std::size_t bytes, Site site);
void seal_copies();
void wait_for_copies(std::size_t last);
// The block's array of that key, made (and filled with NaN patterns) by the first thread that asks.
void* shared_array(const void* key, std::size_t bytes);
// The block's dynamic shared memory.
void* dynamic_shared();
// Runs the grid; returns 0, or CUDA's "invalid configuration" (9) or "invalid value" (1).
int run(const char* kernel, dim3 blocks, dim3 threads, std::size_t dynamic_bytes, void (*body)(void*), void* arguments);

template <typename T>
std::uint64_t as_bits(T value) {
  static_assert(sizeof(T) <= 8, "a register holds at most eight bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

using Touch = void (*)(const void*, std::size_t, Access, Site);

// What `array[i]` is: reads and writes are told to the watch.
template <typename T, Touch touch, Access read = Access::kRead>
class Cell {
 public:
  using Value = std::remove_const_t<T>;
  Cell(T* at, Site site) : at_(at), site_(site) {}
  operator Value() const {
    touch(at_, sizeof(T), read, site_);
    return *at_;
  }
  Value operator=(Value value) const {
    touch(at_, sizeof(T), Access::kWrite, site_);
    return *at_ = value;
  }
  Value operator=(const Cell& other) const { return *this = static_cast<Value>(other); }
  Value operator+=(Value value) const { return *this = static_cast<Value>(*this) + value; }

 private:
  T* at_;
  Site site_;
};

// An index that knows the line on which it stands.
struct Index {
  std::int64_t value;
  Site site;
  Index(std::int64_t value, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : value(value), site{file, line} {}
};

}  // namespace megazero::on_cpu

namespace megazero {

// A pointer into device memory.
template <typename T, on_cpu::Access read = on_cpu::Access::kRead>
class Global {
 public:
  static constexpr on_cpu::Access kRead = read;
  using Element = std::remove_const_t<T>;
  Global() = default;
  Global(T* pointer) : pointer_(pointer) {}
  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T>>>
  Global(Global<U> other) : pointer_(other.get()) {}
  on_cpu::Cell<T, on_cpu::touch_global, read> operator[](on_cpu::Index i) const { return {pointer_ + i.value, i.site}; }
  Global operator+(std::int64_t distance) const { return pointer_ + distance; }
  explicit operator bool() const { return pointer_ != nullptr; }
  T* get() const { return pointer_; }

 private:
  T* pointer_ = nullptr;
};

// A pointer to what many threads read and nobody writes, small enough to stay in the device's cache.
template <typename T>
using Cached = Global<const T, on_cpu::Access::kCachedRead>;

// An array in a block's shared memory.
template <typename T>
class SharedArray {
 public:
  explicit SharedArray(void* data) : data_(static_cast<T*>(data)) {}
  on_cpu::Cell<T, on_cpu::touch_shared> operator[](on_cpu::Index i) const { return {data_ + i.value, i.site}; }
  T* get() const { return data_; }

 private:
  T* data_;
};

// N elements that cross the memory bus together.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <int N, typename Pointer>
Pack<typename Pointer::Element, N> load_pack(Pointer from, on_cpu::Index i) {
  Pack<typename Pointer::Element, N> pack;
  on_cpu::touch_global(from.get() + i.value, sizeof(pack), Pointer::kRead, i.site);
  std::memcpy(&pack, from.get() + i.value, sizeof(pack));
  return pack;
}

template <int N, typename T>
void store_pack(Global<T> to, on_cpu::Index i, const Pack<T, N>& pack) {
  on_cpu::touch_global(to.get() + i.value, sizeof(pack), on_cpu::Access::kWrite, i.site);
  std::memcpy(to.get() + i.value, &pack, sizeof(pack));
}

// A copy is made when it is waited for, so that who reads it earlier finds what was there before.
template <typename T>
void begin_copy(const SharedArray<T>& to, on_cpu::Index at, Global<const T> from, bool real) {
  on_cpu::begin_copy(to.get() + at.value, real ? from.get() : nullptr, 16, at.site);
}
inline void seal_copies() { on_cpu::seal_copies(); }
template <int N>
void wait_for_copies() {
  on_cpu::wait_for_copies(N);
}

template <typename... Parameters, typename... Arguments>
int launch_on_cpu(const char* name, void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::size_t dynamic_bytes,
                  Arguments... arguments) {
  if (!(holds<Parameters>(arguments) && ...)) return kInvalidValue;
  auto call = [&] { kernel(static_cast<Parameters>(arguments)...); };
  return on_cpu::run(
      name, blocks, threads, dynamic_bytes, [](void* body) { (*static_cast<decltype(call)*>(body))(); }, &call);
}

}  // namespace megazero

#define MEGAZERO_ELEMENT(pointer) typename decltype(pointer)::Element

#define MEGAZERO_SITE_PARAMETER ::megazero::on_cpu::Site site = {__builtin_FILE(), __builtin_LINE()}

#define threadIdx (::megazero::on_cpu::place().thread)
#define blockIdx (::megazero::on_cpu::place().block)
#define blockDim (::megazero::on_cpu::place().threads)
#define gridDim (::megazero::on_cpu::place().blocks)

inline void __syncthreads(MEGAZERO_SITE_PARAMETER) { megazero::on_cpu::wait_for_block(site); }

inline void __threadfence() { megazero::on_cpu::fence(); }

inline void __syncwarp(unsigned mask = 0xffffffffu, MEGAZERO_SITE_PARAMETER) {
  megazero::on_cpu::exchange(megazero::on_cpu::Warp::kSync, mask, 0, 0, site);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return from_bits<T>(exchange(Warp::kShuffle, mask, as_bits(value), lane, site));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return from_bits<T>(exchange(Warp::kShuffleXor, mask, as_bits(value), distance, site));
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return from_bits<T>(exchange(Warp::kShuffleDown, mask, as_bits(value), static_cast<int>(distance), site));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return from_bits<T>(exchange(Warp::kShuffleUp, mask, as_bits(value), static_cast<int>(distance), site));
}

inline unsigned __ballot_sync(unsigned mask, int vote, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return static_cast<unsigned>(exchange(Warp::kBallot, mask, 0, vote != 0, site));
}

inline int __any_sync(unsigned mask, int vote, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return exchange(Warp::kBallot, mask, 0, vote != 0, site) != 0;
}

inline int __all_sync(unsigned mask, int vote, MEGAZERO_SITE_PARAMETER) {
  using namespace megazero::on_cpu;
  return exchange(Warp::kBallot, mask, 0, vote == 0, site) == 0;
}

template <typename T>
T atomicAdd(megazero::Global<T> to, T value, MEGAZERO_SITE_PARAMETER) {
  megazero::on_cpu::arrive(to.get());
  megazero::on_cpu::touch_global(to.get(), sizeof(T), megazero::on_cpu::Access::kAtomic, site);
  const T before = *to.get();
  *to.get() = before + value;
  return before;
}

template <typename T>
T atomicOr(megazero::Global<T> to, T value, MEGAZERO_SITE_PARAMETER) {
  megazero::on_cpu::touch_global(to.get(), sizeof(T), megazero::on_cpu::Access::kAtomic, site);
  const T before = *to.get();
  *to.get() = before | value;
  return before;
}

template <typename T>
T atomicMax(megazero::Global<T> to, T value, MEGAZERO_SITE_PARAMETER) {
  megazero::on_cpu::touch_global(to.get(), sizeof(T), megazero::on_cpu::Access::kAtomic, site);
  const T before = *to.get();
  *to.get() = std::max(before, value);
  return before;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __float_as_uint(float x) { return megazero::on_cpu::from_bits<unsigned>(megazero::on_cpu::as_bits(x)); }
inline float __uint_as_float(unsigned x) { return megazero::on_cpu::from_bits<float>(x); }

// Arithmetic that no compiler fuses or reorders, so that all copies of a formula round alike.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
