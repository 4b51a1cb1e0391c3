// The kernels of cuda.cu, and what they share.
#pragma once

#include <limits>

#include "attention/cuda_call.hpp"
#include "attention/cuda_tiles.hpp"

namespace megazero::attention {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// One tensor [rows, samples, heads, size], whose channels are neighbors.
template <typename T>
struct HeadTensor {
  Global<T> at;
  int row;
  std::int64_t sample, head;

  __device__ __forceinline__ HeadRows<T> of(int of_sample, int of_head) const {
    return {at + (of_sample * sample + of_head * head), row};
  }
};

// A result: one tensor, of T or of fp32.
template <typename T>
struct Written {
  HeadTensor<T> narrow;
  HeadTensor<float> wide;

  __device__ __forceinline__ WrittenRows<T> of(int sample, int head) const {
    return {narrow.of(sample, head), wide.at ? wide.of(sample, head) : HeadRows<float>{}};
  }
};

// Gradients of keys and values are sums over the heads of a group, which `shares` blocks share.
template <typename T>
struct Operands {
  HeadTensor<const T> q, k, v;
  int heads_per_group, shares, size;
  float scale;
};

// A block's place: the first of its own rows, and its head or group and sample. Blocks with the most to do come first: in
// a causal call those of the last queries, and those of the first keys.
struct Place {
  int first, head, sample;

  template <bool of_keys>
  static __device__ __forceinline__ Place of(int own) {
    const unsigned tile = of_keys ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return {static_cast<int>(tile) * own, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  }
};

// What a block keeps of a tile's rows beside their channels.
template <int ROWS>
struct Notes {
  SharedArray<int> document;
  SharedArray<std::uint32_t> hash;      // of the columns, or the lower half of the rows
  SharedArray<std::uint32_t> odd_high;  // of rows
  SharedArray<float> lse, delta;

  explicit __device__ __forceinline__ Notes(unsigned char* memory)
      : document(memory), hash(memory + 4 * ROWS), odd_high(memory + 8 * ROWS), lse(memory + 12 * ROWS),
        delta(memory + 16 * ROWS) {}
};

// A block's dynamic memory: two tiles of its own rows, twice two of others, of which one pair is read while the next one is
// copied, notes on the others, a number for each own row.
template <typename T, int D>
constexpr int kTileBytes = Shape<T, D>::kStride * static_cast<int>(sizeof(T));
template <typename T, int D>
constexpr int kOthersAt = 2 * Shape<T, D>::kOwn * kTileBytes<T, D>;
template <typename T, int D>
constexpr int kNotesAt = kOthersAt<T, D> + 4 * Shape<T, D>::kOther * kTileBytes<T, D>;
template <typename T, int D>
constexpr int kDeltasAt = kNotesAt<T, D> + 20 * Shape<T, D>::kOther;
template <typename T, int D>
constexpr int kMemory = kDeltasAt<T, D> + 4 * Shape<T, D>::kOwn;

// Two pairs of tiles of other rows, which take turns.
template <typename T, int D>
struct Others {
  unsigned char* memory;

  __device__ __forceinline__ SharedArray<T> tile(int turn, int number) const {
    return SharedArray<T>(memory + kOthersAt<T, D> + (turn % 2 * 2 + number) * Shape<T, D>::kOther * kTileBytes<T, D>);
  }

  // The block's warps begin to copy the tiles of a turn, rows from `first` on of both tensors, as one batch.
  __device__ __forceinline__ void begin(int turn, const HeadRows<const T>& from_a, const HeadRows<const T>& from_b,
                                        int first, int end, int size) const {
#pragma unroll
    for (int row = 0; row < Shape<T, D>::kOther; row += 8 * Shape<T, D>::kWarps) {
      const int into = row + warp() * 8;
      copy_rows<T, D>(tile(turn, 0), into, from_a, first + into, end, size);
      copy_rows<T, D>(tile(turn, 1), into, from_b, first + into, end, size);
    }
    seal_copies();
  }
};

// Waits for the thread's copies of this turn; those of the next one, if there is one, go on.
__device__ __forceinline__ void wait_for_turn(bool another) {
  if (another) {
    wait_for_copies<1>();
  } else {
    wait_for_copies<0>();
  }
}

// The sum over the four lanes that share a row, in each of them.
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

__device__ __forceinline__ float max_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

// Notes on keys [start, start + ROWS), one by each of the first threads.
template <int ROWS>
__device__ __forceinline__ void note_keys(const Notes<ROWS>& notes, const Visible& visible, const Drops& drops,
                                          int start, int sample) {
  const int i = static_cast<int>(threadIdx.x), key = start + i;
  if (i >= ROWS) return;
  notes.document[i] = key < visible.keys ? visible.document(key, sample) : -1;
  if (drops.keys) notes.hash[i] = key < visible.keys ? drops.column(key, sample) : 0u;
}

// Whether a warp's rows, of which each lane knows its two, and those of a tile are of one document.
template <int ROWS>
__device__ __forceinline__ bool one_document(const Visible& visible, const Notes<ROWS>& notes, const int (&own)[2]) {
  if (!visible.first) return true;
  const int document = __shfl_sync(kAllLanes, own[0], 0);
  bool same = own[0] == document && own[1] == document;
  for (int i = lane(); i < ROWS; i += kWarp) same = same && notes.document[i] == document;
  return __all_sync(kAllLanes, same);
}

// Calls body(j, e, half, column) for each of a lane's numbers of a product, in row quad() + 8 half.
template <int COLUMNS, typename Body>
__device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) body(j, e, e / 2, j * 8 + 2 * pair() + e % 2);
  }
}

// Multiplies one of a lane's two rows.
template <int D>
__device__ __forceinline__ void scale_row(float (&sums)[D / 8][4], int half, float factor) {
#pragma unroll
  for (int c = 0; c < D / 8; ++c) {
    sums[c][half * 2] *= factor;
    sums[c][half * 2 + 1] *= factor;
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(Shape<T, D>::kWarps* kWarp, 1)
    attention_forward(const Operands<T> in, const Visible visible, const Drops drops, const Written<T> out,
                      Global<float> lse) {
  using Sizes = Shape<T, D>;
  MEGAZERO_DYNAMIC_SHARED(unsigned char, memory);
  const SharedArray<T> queries(memory.get());
  const Others<T, D> others{memory.get()};
  const Notes<Sizes::kOther> notes(memory.get() + kNotesAt<T, D>);
  const auto [first, head, sample] = Place::of<false>(Sizes::kOwn);
  const int group = head / in.heads_per_group, own = warp() * 16;
  const HeadRows<const T> q = in.q.of(sample, head), k = in.k.of(sample, group), v = in.v.of(sample, group);
  copy_rows<T, D>(queries, own, q, first + own, visible.queries, in.size);
  copy_rows<T, D>(queries, own + 8, q, first + own + 8, visible.queries, in.size);

  const int query[2] = {first + own + quad(), first + own + quad() + 8};
  int document[2];
  KeepRow kept[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool real = query[half] < visible.queries;
    document[half] = real ? visible.document(query[half] + visible.shift(), sample) : 0;
    kept[half] = real && drops.keys ? drops.row(query[half], sample, head) : KeepRow{0, 0};
  }
  const auto mask = visible.mask_of(sample, head);
  const int last = first + Sizes::kOwn < visible.queries ? first + Sizes::kOwn : visible.queries;
  const Span span = visible.span<false>(first, last, sample);
  const float factor = in.scale * kLog2e;
  float sums[D / 8][4] = {}, highest[2] = {kNothing, kNothing}, total[2] = {0.0f, 0.0f};
  int turn = 0;
  others.begin(turn, k, v, span.begin, visible.keys, in.size);
  for (int start = span.begin; start < span.end; start += Sizes::kOther, ++turn) {
    const int next = start + Sizes::kOther;
    if (next < span.end) others.begin(turn + 1, k, v, next, visible.keys, in.size);
    note_keys(notes, visible, drops, start, sample);
    wait_for_turn(next < span.end);
    __syncthreads();
    const SharedArray<T> keys = others.tile(turn, 0), values = others.tile(turn, 1);
    float scores[Sizes::kColumns][4];
    multiply_rows<T, D>(scores, queries, own, keys);
    const bool all = one_document(visible, notes, document) && visible.sees_all(first + own, 16, start, Sizes::kOther);
    float most[2] = {highest[0], highest[1]};
    for_each<Sizes::kColumns>([&](int j, int e, int half, int column) {
      scores[j][e] *= factor;
      if (!all && (document[half] != notes.document[column] || !visible.sees(mask, query[half], start + column))) {
        scores[j][e] = kNothing;
      }
      most[half] = fmaxf(most[half], scores[j][e]);
    });
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = max_of_row(most[half]);
      base[half] = most[half] == kNothing ? 0.0f : most[half];
      const float shrink = exp2f(highest[half] - base[half]);
      highest[half] = most[half];
      total[half] *= shrink;
      scale_row<D>(sums, half, shrink);
    }
    for_each<Sizes::kColumns>([&](int j, int e, int half, int column) {
      const float p = exp2f(scores[j][e] - base[half]);
      total[half] += p;
      scores[j][e] = !drops.keys || kept[half].keeps(notes.hash[column], drops.threshold) ? p : 0.0f;
    });
    add_weighted<T, D>(sums, scores, values, in.size);
    __syncthreads();  // the tile has been read, and so have its notes
  }
  wait_for_copies<0>();  // there are some where no key is seen
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = sum_of_row(total[half]);
    scale_row<D>(sums, half, total[half] == 0.0f ? 0.0f : 1.0f / total[half]);
    if (pair() == 0 && query[half] < visible.queries) {
      lse[(static_cast<std::int64_t>(sample) * gridDim.y + head) * visible.queries + query[half]] =
          total[half] == 0.0f ? kNothing : highest[half] * kLn2 + logf(total[half]);
    }
  }
  store_rows<T, D>(sums, drops.keys ? drops.kept : 1.0f, queries, own, out.of(sample, head), first + own, visible.queries, in.size);
}

// A warp copies its own 16 rows of a gradient, and multiplies them with those of the result: deltas[row] = sum over
// channels, less grad_lse where there is one. A score's probability is the derivative of lse by it.
template <typename T, int D>
__device__ __forceinline__ void copy_gradients(const SharedArray<T>& tile, const SharedArray<float>& deltas, int own,
                                               const HeadRows<const T>& grad, const HeadRows<const T>& out, int first,
                                               int end, int size, Global<const float> grad_lse, Global<float> delta) {
  constexpr int kPack = Shape<T, D>::kPack;
  const auto packs = in_packs<T, D>(tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int into = own + half * 8 + lane() % 8, row = first + into;
    float sum = 0.0f;
#pragma unroll
    for (int c = lane() / 8; c < D / kPack; c += 4) {
      Pack<T, kPack> pack{};
      if (row < end && c * kPack < size) {
        pack = load_pack<kPack>(grad.of(row), c * kPack);
        const Pack<T, kPack> result = load_pack<kPack>(out.of(row), c * kPack);
#pragma unroll
        for (int n = 0; n < kPack; ++n) sum += to_float(pack.at[n]) * to_float(result.at[n]);
      }
      packs[into * (Shape<T, D>::kStride / kPack) + c] = pack;
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 8);
    sum += __shfl_xor_sync(kAllLanes, sum, 16);
    if (lane() < 8) {
      if (row < end && grad_lse) sum -= grad_lse[row];
      if (row < end) delta[row] = sum;
      deltas[into] = sum;
    }
  }
  __syncwarp();
}

// The gradient of queries, and `delta` [samples, heads, queries] for the gradients of keys and values.
template <typename T, int D>
__global__ void __launch_bounds__(Shape<T, D>::kWarps* kWarp, 1)
    attention_backward_queries(const Operands<T> in, const Visible visible, const Drops drops,
                               const HeadTensor<const T> out, const HeadTensor<const T> grad, Global<const float> lse,
                               Global<const float> grad_lse, Global<float> delta, const Written<T> grad_q) {
  using Sizes = Shape<T, D>;
  MEGAZERO_DYNAMIC_SHARED(unsigned char, memory);
  const SharedArray<T> queries(memory.get()), grads(queries.get() + Sizes::kOwn * Sizes::kStride);
  const Others<T, D> others{memory.get()};
  const Notes<Sizes::kOther> notes(memory.get() + kNotesAt<T, D>);
  const SharedArray<float> deltas(memory.get() + kDeltasAt<T, D>);
  const auto [first, head, sample] = Place::of<false>(Sizes::kOwn);
  const int group = head / in.heads_per_group, own = warp() * 16;
  const std::int64_t rows = (static_cast<std::int64_t>(sample) * gridDim.y + head) * visible.queries;
  const HeadRows<const T> q = in.q.of(sample, head), k = in.k.of(sample, group), v = in.v.of(sample, group);
  copy_rows<T, D>(queries, own, q, first + own, visible.queries, in.size);
  copy_rows<T, D>(queries, own + 8, q, first + own + 8, visible.queries, in.size);
  copy_gradients<T, D>(grads, deltas, own, grad.of(sample, head), out.of(sample, head), first, visible.queries, in.size,
                       grad_lse ? grad_lse + rows : grad_lse, delta + rows);

  const int query[2] = {first + own + quad(), first + own + quad() + 8};
  int document[2];
  KeepRow kept[2];
  float of_row[2], base[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool real = query[half] < visible.queries;
    document[half] = real ? visible.document(query[half] + visible.shift(), sample) : 0;
    kept[half] = real && drops.keys ? drops.row(query[half], sample, head) : KeepRow{0, 0};
    of_row[half] = deltas[own + quad() + half * 8];
    base[half] = (real ? static_cast<float>(lse[rows + query[half]]) : 0.0f) * kLog2e;
  }
  const auto mask = visible.mask_of(sample, head);
  const int last = first + Sizes::kOwn < visible.queries ? first + Sizes::kOwn : visible.queries;
  const Span span = visible.span<false>(first, last, sample);
  const float factor = in.scale * kLog2e;
  float sums[D / 8][4] = {};
  int turn = 0;
  others.begin(turn, k, v, span.begin, visible.keys, in.size);
  for (int start = span.begin; start < span.end; start += Sizes::kOther, ++turn) {
    const int next = start + Sizes::kOther;
    if (next < span.end) others.begin(turn + 1, k, v, next, visible.keys, in.size);
    note_keys(notes, visible, drops, start, sample);
    wait_for_turn(next < span.end);
    __syncthreads();
    const SharedArray<T> keys = others.tile(turn, 0), values = others.tile(turn, 1);
    float scores[Sizes::kColumns][4], of_p[Sizes::kColumns][4];
    multiply_rows<T, D>(scores, queries, own, keys);
    multiply_rows<T, D>(of_p, grads, own, values);
    const bool all = one_document(visible, notes, document) && visible.sees_all(first + own, 16, start, Sizes::kOther);
    for_each<Sizes::kColumns>([&](int j, int e, int half, int column) {
      const bool sees =
          all || (document[half] == notes.document[column] && visible.sees(mask, query[half], start + column));
      const float p = sees ? exp2f(scores[j][e] * factor - base[half]) : 0.0f;
      float upstream = of_p[j][e];
      if (drops.keys) upstream = kept[half].keeps(notes.hash[column], drops.threshold) ? upstream * drops.kept : 0.0f;
      scores[j][e] = sees ? p * (upstream - of_row[half]) : 0.0f;
    });
    add_weighted<T, D>(sums, scores, keys, in.size);
    __syncthreads();  // the tile has been read, and so have its notes
  }
  wait_for_copies<0>();  // there are some where no key is seen
  store_rows<T, D>(sums, in.scale, queries, own, grad_q.of(sample, head), first + own, visible.queries, in.size);
}

// Notes on queries [start, start + ROWS) of a head, one by each of the first threads.
template <int ROWS>
__device__ __forceinline__ void note_queries(const Notes<ROWS>& notes, const Visible& visible, const Drops& drops,
                                             Global<const float> lse, Global<const float> delta, int start, int sample,
                                             int head) {
  const int i = static_cast<int>(threadIdx.x), query = start + i;
  if (i >= ROWS) return;
  const bool real = query < visible.queries;
  notes.document[i] = real ? visible.document(query + visible.shift(), sample) : -1;
  notes.lse[i] = (real ? static_cast<float>(lse[query]) : 0.0f) * kLog2e;
  notes.delta[i] = real ? static_cast<float>(delta[query]) : 0.0f;
  if (!drops.keys) return;
  const KeepRow kept = real ? drops.row(query, sample, head) : KeepRow{0, 0};
  notes.hash[i] = kept.low;
  notes.odd_high[i] = kept.odd_high;
}

// The gradients of keys and values, whose rows see a tile of queries at a time: scores are [keys, queries] here.
template <typename T, int D>
__global__ void __launch_bounds__(Shape<T, D>::kWarps* kWarp, 1)
    attention_backward_keys(const Operands<T> in, const Visible visible, const Drops drops,
                            const HeadTensor<const T> grad, Global<const float> lse, Global<const float> delta,
                            const Written<T> grad_k, const Written<T> grad_v) {
  using Sizes = Shape<T, D>;
  MEGAZERO_DYNAMIC_SHARED(unsigned char, memory);
  const SharedArray<T> keys(memory.get()), values(keys.get() + Sizes::kOwn * Sizes::kStride);
  const Others<T, D> others{memory.get()};
  const Notes<Sizes::kOther> notes(memory.get() + kNotesAt<T, D>);
  const Place place = Place::of<true>(Sizes::kOwn);
  const int first = place.first, share = place.head, sample = place.sample;
  const int own = warp() * 16, group = share / in.shares, heads = in.heads_per_group / in.shares;
  const HeadRows<const T> k = in.k.of(sample, group), v = in.v.of(sample, group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_rows<T, D>(keys, own + half * 8, k, first + own + half * 8, visible.keys, in.size);
    copy_rows<T, D>(values, own + half * 8, v, first + own + half * 8, visible.keys, in.size);
  }
  const int key[2] = {first + own + quad(), first + own + quad() + 8};
  int document[2];
  std::uint32_t hash[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool real = key[half] < visible.keys;
    document[half] = real ? visible.document(key[half], sample) : 0;
    hash[half] = real && drops.keys ? drops.column(key[half], sample) : 0u;
  }
  const int last = first + Sizes::kOwn < visible.keys ? first + Sizes::kOwn : visible.keys;
  const Span span = visible.span<true>(first, last, sample);
  const float factor = in.scale * kLog2e, kept = drops.keys ? drops.kept : 1.0f;
  float sums_k[D / 8][4] = {}, sums_v[D / 8][4] = {};
  const auto begin = [&](int turn, int head, int start) {
    others.begin(turn, in.q.of(sample, head), grad.of(sample, head), start, visible.queries, in.size);
  };
  int turn = 0;
  begin(turn, share * heads, span.begin);
  for (int head = share * heads; head < (share + 1) * heads; ++head) {
    const std::int64_t rows = (static_cast<std::int64_t>(sample) * gridDim.y * heads + head) * visible.queries;
    const auto mask = visible.mask_of(sample, head);
    for (int start = span.begin; start < span.end; start += Sizes::kOther, ++turn) {
      const bool ends = start + Sizes::kOther >= span.end, another = !ends || head + 1 < (share + 1) * heads;
      if (another) begin(turn + 1, head + ends, ends ? span.begin : start + Sizes::kOther);
      note_queries(notes, visible, drops, lse + rows, delta + rows, start, sample, head);
      wait_for_turn(another);
      __syncthreads();
      const SharedArray<T> queries = others.tile(turn, 0), grads = others.tile(turn, 1);
      float scores[Sizes::kColumns][4], of_p[Sizes::kColumns][4];
      multiply_rows<T, D>(scores, keys, own, queries);
      multiply_rows<T, D>(of_p, values, own, grads);
      const bool all = one_document(visible, notes, document) && visible.sees_all(start, Sizes::kOther, first + own, 16);
      for_each<Sizes::kColumns>([&](int j, int e, int half, int column) {
        const bool sees =
            all || (document[half] == notes.document[column] && visible.sees(mask, start + column, key[half]));
        const float p = sees ? exp2f(scores[j][e] * factor - notes.lse[column]) : 0.0f;
        bool keeps = true;
        if (drops.keys) {
          const KeepRow row{notes.hash[column], notes.odd_high[column]};
          keeps = row.keeps(hash[half], drops.threshold);
        }
        scores[j][e] = keeps ? p : 0.0f;
        const float upstream = keeps ? of_p[j][e] * kept : 0.0f;
        of_p[j][e] = sees ? p * (upstream - notes.delta[column]) : 0.0f;
      });
      add_weighted<T, D>(sums_v, scores, grads, in.size);
      add_weighted<T, D>(sums_k, of_p, queries, in.size);
      __syncthreads();  // the tile has been read, and so have its notes
    }
  }
  wait_for_copies<0>();  // there are some where no query sees a key
  store_rows<T, D>(sums_k, in.scale, keys, own, grad_k.of(sample, share), first + own, visible.keys, in.size);
  store_rows<T, D>(sums_v, kept, values, own, grad_v.of(sample, share), first + own, visible.keys, in.size);
}

}  // namespace megazero::attention
