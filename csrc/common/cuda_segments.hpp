// Lists of flat tensors through which one launch goes: the frame of optimizers and of norms ("multi-tensor apply" of
// NVIDIA's apex).
//
// A segment is a range of elements that lies in several buffers: masters, their gradient, their moments. Up to kMost of
// them travel in a launch's arguments, so that no table has to be copied to the device; a longer list takes several
// launches. A block takes a chunk of a segment. An element's result depends on that element alone, wherever it lies.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/cuda.hpp"

namespace megazero {

// Part of a segment: elements from `begin`, which may lie up to a pack before the segment, so that packs are aligned.
struct Chunk {
  int segment;
  bool packed;  // all buffers can be reached in packs
  std::int64_t begin, length;
};

// `count` segments in BUFFERS buffers, which are reached in packs of PACK elements.
template <int BUFFERS, int PACK>
struct Segments {
  static constexpr int kBuffers = BUFFERS;
  static constexpr int kPack = PACK;
  static constexpr int kMost = 64;
  static constexpr std::int8_t kApart = -1;

  int count, chunk;
  int first_chunk[kMost + 1];
  std::int64_t length[kMost];
  void* at[BUFFERS][kMost];
  std::int8_t ahead[kMost];  // elements from the last place for a pack to the segment; kApart: buffers differ in that

  template <typename T>
  __device__ __forceinline__ Global<T> buffer(int number, int segment) const {
    return Global<T>(static_cast<T*>(at[number][segment]));
  }

  // The chunk of block `block`, whose segment is the last that begins no later.
  __device__ __forceinline__ Chunk chunk_of(int block) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_chunk[middle] <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const bool packed = ahead[low] != kApart;
    const std::int64_t begin = static_cast<std::int64_t>(block - first_chunk[low]) * chunk;
    return {low, packed, begin - (packed ? ahead[low] : 0), length[low]};
  }

  // Calls body(i, pack) for this thread's elements of a chunk: pack() of them from i on, PACK or one.
  template <typename Body>
  __device__ __forceinline__ void each_pack(const Chunk& part, const Body& body) const {
    using Whole = std::integral_constant<int, PACK>;
    using Single = std::integral_constant<int, 1>;
    const int width = part.packed ? PACK : 1;
    for (int j = static_cast<int>(threadIdx.x) * width; j < chunk; j += static_cast<int>(blockDim.x) * width) {
      const std::int64_t i = part.begin + j;
      if (part.packed && i >= 0 && i + PACK <= part.length) {
        body(i, Whole{});
      } else {
#pragma unroll 1
        for (int n = 0; n < width; ++n) {
          if (i + n >= 0 && i + n < part.length) body(i + n, Single{});
        }
      }
    }
  }
};

// A list's addresses in one buffer, and the size of an element; 0 where each segment has a single number. An address
// that is 0 stands for a buffer that the segment does without.
struct BufferList {
  const std::int64_t* addresses;
  std::size_t element;
};

// Calls start(segments, chunks, first) for one batch of the list after the other, of which `first` is the first;
// returns the first error's code.
template <typename List, typename Start>
int for_segments(std::int64_t count, const std::int64_t* lengths, const BufferList (&lists)[List::kBuffers],
                 std::int64_t chunk, const Start& start) {
  if (chunk < List::kPack || chunk % List::kPack != 0 || chunk > 1 << 30) return 1;
  for (std::int64_t first = 0; first < count; first += List::kMost) {
    List all{};
    all.count = static_cast<int>(std::min<std::int64_t>(List::kMost, count - first));
    all.chunk = static_cast<int>(chunk);
    for (int segment = 0; segment < all.count; ++segment) {
      std::int64_t ahead = -1;
      bool apart = false;
      for (int buffer = 0; buffer < List::kBuffers; ++buffer) {
        const BufferList& list = lists[buffer];
        const auto address = static_cast<std::uintptr_t>(list.addresses[first + segment]);
        all.at[buffer][segment] = reinterpret_cast<void*>(address);
        if (address == 0 || list.element == 0) continue;
        const auto own = static_cast<std::int64_t>(address % (List::kPack * list.element) / list.element);
        apart |= ahead >= 0 && own != ahead;
        ahead = own;
      }
      all.ahead[segment] = apart ? List::kApart : static_cast<std::int8_t>(std::max<std::int64_t>(ahead, 0));
      all.length[segment] = lengths[first + segment];
      const std::int64_t filled = all.length[segment] == 0 || apart ? 0 : all.ahead[segment];
      all.first_chunk[segment + 1] = all.first_chunk[segment] + ceil_div(all.length[segment] + filled, chunk);
    }
    const int code = start(all, all.first_chunk[all.count], first);
    if (code != 0) return code;
  }
  return 0;
}

// Sums over a block's threads, in thread 0. The threads are whole warps.
template <int COUNT>
__device__ __forceinline__ void block_sums(double (&values)[COUNT]) {
  MEGAZERO_SHARED(double, partials, kWarp * COUNT);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      values[c] += __shfl_xor_sync(kAllLanes, values[c], distance);
    }
    if (lane == 0) partials[c * kWarp + warp] = values[c];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    values[c] = 0.0;
    for (int w = 0; w < warps; ++w) values[c] += partials[c * kWarp + w];
  }
}

}  // namespace megazero
