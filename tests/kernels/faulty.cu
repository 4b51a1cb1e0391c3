// One kernel per thing that the watch must see, and for each a neighbor that does it right (suffix _right).
#include "common/cuda.hpp"

namespace megazero {

// Shared memory is written by one thread and read by another.
__global__ void reverse_without_barrier(Global<const float> x, Global<float> y) {
  MEGAZERO_SHARED(float, held, 64);
  held[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

__global__ void reverse_right(Global<const float> x, Global<float> y) {
  MEGAZERO_SHARED(float, held, 64);
  held[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

// The array is used again before everyone has read it.
__global__ void reverse_twice_without_second_barrier(Global<const float> x, Global<float> y) {
  MEGAZERO_SHARED(float, held, 64);
  for (int i = 0; i < 2; ++i) {
    held[threadIdx.x] = x[i * 64 + threadIdx.x];
    __syncthreads();
    y[i * 64 + threadIdx.x] = held[63 - threadIdx.x];
  }
}

__global__ void barrier_for_some(Global<const float> x, Global<float> y) {
  if (threadIdx.x < 40) __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];
}

__global__ void shuffle_for_some(Global<const float> x, Global<float> y) {
  float value = x[threadIdx.x];
  if (threadIdx.x < 20) value = __shfl_xor_sync(kAllLanes, value, 1);
  y[threadIdx.x] = value;
}

__global__ void shuffle_from_outside_of_the_mask(Global<const float> x, Global<float> y) {
  float value = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) value = __shfl_sync(0xffffu, value, 20);
  y[threadIdx.x] = value;
}

__global__ void one_past_the_end(Global<const float> x, Global<float> y) { y[threadIdx.x] = x[threadIdx.x + 1]; }

__global__ void past_the_shared_end(Global<const float> x, Global<float> y) {
  MEGAZERO_SHARED(float, held, 63);
  held[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = 0.0f;
}

__global__ void misaligned_pack(Global<const float> x, Global<float> y) {
  const auto pack = load_pack<4>(x, 1);
  y[threadIdx.x] = pack.at[0];
}

__global__ void read_of_nothing(Global<const float> x, Global<float> y) {
  MEGAZERO_SHARED(float, held, 64);
  if (threadIdx.x == 0) held[0] = x[0];
  __syncthreads();
  y[threadIdx.x] = held[threadIdx.x];
}

__global__ void blocks_write_one_place(Global<const float> x, Global<float> y) { y[threadIdx.x] = x[threadIdx.x]; }

__global__ void strided(Global<const float> x, Global<float> y) { y[threadIdx.x] = x[threadIdx.x * 8]; }

__global__ void twice_read(Global<const float> x, Global<float> y) { y[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x]; }

__global__ void cached(Cached<float> x, Global<float> y) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x];
}

// Lanes step by `stride` words.
__global__ void banks(int stride, Global<const float> x, Global<float> y) {
  MEGAZERO_SHARED(float, held, 32 * 33);
  held[threadIdx.x * stride] = x[threadIdx.x];
  y[threadIdx.x] = held[threadIdx.x * stride];
}

__global__ void warp_operations(Global<const float> x, Global<float> y) {
  const int lane = threadIdx.x;
  const float value = x[lane];
  y[lane] = __shfl_sync(kAllLanes, value, 3);
  y[32 + lane] = __shfl_xor_sync(kAllLanes, value, 5);
  y[64 + lane] = __shfl_down_sync(kAllLanes, value, 2);
  y[96 + lane] = __shfl_up_sync(kAllLanes, value, 2);
  y[128 + lane] = static_cast<float>(__popc(__ballot_sync(kAllLanes, lane % 3 == 0)));
  y[160 + lane] = warp_sum(value);
  y[192 + lane] = warp_max(value);
  // Half of the lanes among themselves.
  if (lane < 16) y[224 + lane] = __shfl_down_sync(0xffffu, value, 1);
}

// The block that comes last reads what all have written; which fences and which barrier there are.
template <bool first_fence, bool second_fence, bool barrier>
__device__ __forceinline__ void last_block_reads(Global<const float> x, Global<float> y, Global<int> counter) {
  MEGAZERO_SHARED(int, last, 1);
  y[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (first_fence) __threadfence();
    last[0] = atomicAdd(counter, 1) == static_cast<int>(gridDim.x) - 1;
    if (second_fence) __threadfence();
  }
  __syncthreads();
  if (last[0] == 0) return;
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += y[block * blockDim.x + (threadIdx.x + 1) % blockDim.x];
  y[256 + threadIdx.x] = sum;
}

__global__ void arrival_right(Global<const float> x, Global<float> y, Global<int> counter) {
  last_block_reads<true, true, true>(x, y, counter);
}

__global__ void arrival_without_fence_before(Global<const float> x, Global<float> y, Global<int> counter) {
  last_block_reads<false, true, true>(x, y, counter);
}

__global__ void arrival_without_fence_after(Global<const float> x, Global<float> y, Global<int> counter) {
  last_block_reads<true, false, true>(x, y, counter);
}

__global__ void arrival_without_barrier(Global<const float> x, Global<float> y, Global<int> counter) {
  last_block_reads<true, true, false>(x, y, counter);
}

}  // namespace megazero

using namespace megazero;

#define FAULTY(kernel, blocks, threads)                                                            \
  extern "C" int megazero_cuda_##kernel(const float* x, float* y, void* stream) {                  \
    return MEGAZERO_LAUNCH((kernel), dim3(blocks), dim3(threads), 0, stream, x, y);                \
  }                                                                                                \
  MEGAZERO_EXPORT(kernel)

FAULTY(reverse_without_barrier, 1, 64)
FAULTY(reverse_right, 1, 64)
FAULTY(reverse_twice_without_second_barrier, 1, 64)
FAULTY(barrier_for_some, 1, 64)
FAULTY(shuffle_for_some, 1, 32)
FAULTY(shuffle_from_outside_of_the_mask, 1, 32)
FAULTY(one_past_the_end, 1, 64)
FAULTY(past_the_shared_end, 1, 64)
FAULTY(misaligned_pack, 1, 1)
FAULTY(read_of_nothing, 1, 64)
FAULTY(blocks_write_one_place, 2, 32)
FAULTY(strided, 1, 32)
FAULTY(twice_read, 1, 32)
FAULTY(cached, 2, 32)
FAULTY(warp_operations, 1, 32)

extern "C" int megazero_cuda_too_many_threads(const float* x, float* y, void* stream) {
  return MEGAZERO_LAUNCH((strided), dim3(1), dim3(1025), 0, stream, x, y);
}
MEGAZERO_EXPORT(too_many_threads)

extern "C" int megazero_cuda_banks(std::int64_t stride, const float* x, float* y, void* stream) {
  return MEGAZERO_LAUNCH((banks), dim3(1), dim3(32), 0, stream, stride, x, y);
}
MEGAZERO_EXPORT(banks)

// The counter is y's last place.
#define ARRIVAL(kernel)                                                                                       \
  extern "C" int megazero_cuda_##kernel(const float* x, float* y, void* stream) {                             \
    int* counter = reinterpret_cast<int*>(y + 511);                                                           \
    return MEGAZERO_LAUNCH((kernel), dim3(3), dim3(64), 0, stream, x, y, counter);                            \
  }                                                                                                           \
  MEGAZERO_EXPORT(kernel)

ARRIVAL(arrival_right)
ARRIVAL(arrival_without_fence_before)
ARRIVAL(arrival_without_fence_after)
ARRIVAL(arrival_without_barrier)
