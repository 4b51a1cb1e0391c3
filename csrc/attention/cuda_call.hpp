// A call of attention on a GPU besides its tensors: which keys a query sees, and what is dropped.
#pragma once

#include "common/cuda_keep.hpp"

namespace megazero::attention {

// Beyond what any sequence has: the limit of a side that has none.
constexpr int kNoLimit = 1 << 30;

// The rows of the other side that a block of rows has to do with: [begin, end).
struct Span {
  int begin, end;
};

// Which keys a query sees: those at most `left` before and `right` after its own key, where the last query's own key is
// the last one, in its own document, where the mask is not 0. first and stop: [samples, keys], where a key's document
// begins and ends, or none; a document is known by where it begins. mask: bytes at the sum of the strides, or none.
struct Visible {
  int queries, keys, left, right;
  Cached<int> first, stop;
  Global<const std::uint8_t> mask;
  std::int64_t mask_sample, mask_head, mask_query, mask_key;

  __device__ __forceinline__ int shift() const { return keys - queries; }

  // The keys that queries [from, to) may see, or with `turned` the queries that may see keys [from, to). All lanes of a
  // warp must call it.
  template <bool turned>
  __device__ __forceinline__ Span span(int from, int to, int sample) const {
    const int before = turned ? right : left, after = turned ? left : right;
    // Queries are counted by their own keys, the first of which may be before the first key.
    const int own = turned ? from : from + shift(), last = (turned ? to : to + shift()) - 1;
    const int lowest_of_all = turned ? shift() : 0;
    int begin = own - before > lowest_of_all ? own - before : lowest_of_all;
    int end = last + after + 1 < keys ? last + after + 1 : keys;
    if (first) {
      int lowest = keys, highest = 0;
      for (int key = own + static_cast<int>(threadIdx.x % kWarp); key <= last; key += kWarp) {
        const int starts = first[static_cast<std::int64_t>(sample) * keys + key];
        const int stops = stop[static_cast<std::int64_t>(sample) * keys + key];
        lowest = starts < lowest ? starts : lowest;
        highest = stops > highest ? stops : highest;
      }
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const int other = __shfl_xor_sync(kAllLanes, lowest, distance);
        const int another = __shfl_xor_sync(kAllLanes, highest, distance);
        lowest = other < lowest ? other : lowest;
        highest = another > highest ? another : highest;
      }
      begin = lowest > begin ? lowest : begin;
      end = highest < end ? highest : end;
    }
    return turned ? Span{begin - shift(), end - shift()} : Span{begin, end};
  }

  // A number for the document of a key; 0 for all where there are none.
  __device__ __forceinline__ int document(int key, int sample) const {
    return first ? static_cast<int>(first[static_cast<std::int64_t>(sample) * keys + key]) : 0;
  }

  // Whether queries from `query` on, `queries_` of them, see all of `keys_` keys from `key` on, if all are of one document.
  __device__ __forceinline__ bool sees_all(int query, int queries_, int key, int keys_) const {
    const int own = query + shift();
    return !mask && query + queries_ <= queries && key + keys_ <= keys &&
           key - (own + queries_ - 1) >= -left && key + keys_ - 1 - own <= right;
  }

  // The mask's place for a query and key of a head.
  __device__ __forceinline__ Global<const std::uint8_t> mask_of(int sample, int head) const {
    return mask ? mask + (sample * mask_sample + head * mask_head) : mask;
  }

  __device__ __forceinline__ bool sees(Global<const std::uint8_t> of_head, int query, int key) const {
    const int distance = key - query - shift();
    if (query >= queries || key >= keys || distance < -left || distance > right) return false;
    return !of_head || of_head[query * mask_query + key * mask_key] != 0;
  }
};

// Positions of rows [rows, samples]: evenly spaced, or where their strides say.
struct Places {
  Cached<std::int64_t> at;
  std::int64_t start, step, row, sample;

  __device__ __forceinline__ std::int64_t of(int number, int of_sample) const {
    return at ? static_cast<std::int64_t>(at[number * row + of_sample * sample]) : start + step * number;
  }
};

// Dropout as megazero/ops/dropout.py has it: keys [samples], or `key_row` apart for each query; none if nothing is
// dropped. What is kept is multiplied by `kept`.
struct Drops {
  Cached<std::int64_t> keys;
  std::int64_t key_row, head_offset;
  Places queries, columns;
  std::int32_t threshold;
  float kept;

  static __device__ __forceinline__ std::uint64_t derive(std::uint64_t key, std::int64_t index) {
    return mix_64(static_cast<std::uint64_t>(index + 1) * kGoldenGamma + mix_64(key));
  }

  __device__ __forceinline__ KeepRow row(int query, int sample, int head) const {
    const std::int64_t key = keys[query * key_row + sample];
    const std::uint64_t of_head = derive(static_cast<std::uint64_t>(key), head_offset + head);
    return KeepRow::of(static_cast<std::int64_t>(derive(of_head, queries.of(query, sample))));
  }

  __device__ __forceinline__ std::uint32_t column(int key, int sample) const {
    return keep_column(columns.of(key, sample));
  }
};

}  // namespace megazero::attention
