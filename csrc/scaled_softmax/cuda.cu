// softmax(scale * scores) over rows of keys, where the mask allows. scores, probs: [outer, inner, queries, keys].
// causal: the last query sees the last key. mask: bytes [.., keys or 1], 0 where a key may not be attended to, or none;
// its strides are 0 where it is broadcast. document_ids: int32 or int64 [outer, keys], or none: a query attends only to
// keys of the document of its own key, where the last query's is the last key. A row that may attend to nothing gives
// zeros.
//
// What causality and documents hide is not read. Ids are compared wherever they lie, so a document may come back after
// another one; a row's ids are read by all its sample's queries and heads, from the cache.
#include <limits>

#include "common/cuda_rows.hpp"

namespace megazero {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What the queries may attend to.
struct Visible {
  std::int64_t inner, queries;
  std::int64_t outer_stride, inner_stride, query_stride, key_stride;
  int keys;
  bool causal;
  const void* document_ids;
  bool wide_ids;  // of 64 bits

  // How many keys, from the first on, the row may see before the mask is asked.
  __device__ __forceinline__ int keys_of(std::int64_t row) const {
    if (!causal) return keys;
    const std::int64_t seen = row % queries + (keys - queries) + 1;
    return static_cast<int>(seen < 0 ? 0 : seen < keys ? seen : keys);
  }

  __device__ __forceinline__ std::int64_t mask_of(std::int64_t row) const {
    const std::int64_t above = row / queries, outer = above / inner;
    return outer * outer_stride + (above - outer * inner) * inner_stride + (row - above * queries) * query_stride;
  }
};

// A thread's elements of a tile, as bits: k N + n stands for element n of pack k.
using TileBits = unsigned;

template <int N>
__device__ __forceinline__ TileBits pack_of(TileBits bits, int k) {
  return (bits >> (k * N)) & ((1u << N) - 1);
}

template <int N>
__device__ __forceinline__ bool has(TileBits bits, int k, int n) {
  return ((bits >> (k * N + n)) & 1u) != 0;
}

// Of the row's first `seen` keys those with the row's own id.
template <typename Id, int N, bool whole>
__device__ __forceinline__ TileBits equal_ids(Cached<Id> ids, int own_key, int t, int seen) {
  using Row = Tile<N, whole>;
  constexpr int kAtOnce = N * sizeof(Id) > 16 ? 16 / static_cast<int>(sizeof(Id)) : N;
  const Id own = ids[own_key];
  TileBits equal = 0;
#pragma unroll
  for (int k = 0; k < Row::kPacks; ++k) {
    const int at = Row::at(t, k);
    if (at >= seen) continue;
#pragma unroll
    for (int part = 0; part < N; part += kAtOnce) {
      const auto pack = load_pack<kAtOnce>(ids, at + part);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (at + part + n < seen && pack.at[n] == own) equal |= 1u << (k * N + part + n);
      }
    }
  }
  return equal;
}

// Of the row's first `seen` keys those of its own document.
template <int N, bool whole>
__device__ __forceinline__ TileBits own_document(const Visible& visible, std::int64_t row, int t, int seen) {
  const std::int64_t above = row / visible.queries, begin = above / visible.inner * visible.keys;
  const int own_key = static_cast<int>(row - above * visible.queries + (visible.keys - visible.queries));
  if (visible.wide_ids) {
    const Cached<std::int64_t> ids = static_cast<const std::int64_t*>(visible.document_ids) + begin;
    return equal_ids<std::int64_t, N, whole>(ids, own_key, t, seen);
  }
  const Cached<std::int32_t> ids = static_cast<const std::int32_t*>(visible.document_ids) + begin;
  return equal_ids<std::int32_t, N, whole>(ids, own_key, t, seen);
}

// Scales the tile, and puts -inf where the query may not attend: outside of its `own` keys where there are documents,
// otherwise beyond those seen; and where the mask says so. Returns how many keys of the thread's it may see.
template <bool documents, int N, bool whole>
__device__ __forceinline__ float mask_tile(Tile<N, whole>& tile, int t, int seen, TileBits own, float scale,
                                           Global<const std::uint8_t> mask, std::int64_t key_stride) {
  using Row = Tile<N, whole>;
  float allowed = 0.0f;
#pragma unroll
  for (int k = 0; k < Row::kPacks; ++k) {
    const int at = Row::at(t, k);
    Pack<std::uint8_t, N> open;
#pragma unroll
    for (int n = 0; n < N; ++n) open.at[n] = 1;
    if (mask && at < seen && (!documents || pack_of<N>(own, k) != 0)) {
      if (key_stride == 1) {
        open = load_pack<N>(mask, at);
      } else {
        const std::uint8_t all = mask[0];
#pragma unroll
        for (int n = 0; n < N; ++n) open.at[n] = all;
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const bool may = (documents ? has<N>(own, k, n) : at + n < seen) && open.at[n] != 0;
      tile.value[k][n] = may ? tile.value[k][n] * scale : kNothing;
      allowed += may ? 1.0f : 0.0f;
    }
  }
  return allowed;
}

// A thread keeps the largest score that it has seen, and scales its sum of exponentials when it sees a larger one
// (Milakov & Gimelshein 2018), so a row that does not fit into registers is read twice.
template <typename T, int N, bool whole, bool documents>
__global__ void __launch_bounds__(1024, documents ? 1 : 0)  // 0: as many blocks as the compiler likes
    scaled_softmax_forward(std::int64_t count, Visible visible, Global<const T> scores, float scale,
                           Global<const std::uint8_t> mask, Global<T> probs) {
  using Row = Tile<N, whole>;
  const int keys = visible.keys, tiles = Row::count(keys);
  Row tile;
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const int seen = visible.keys_of(row);
    const Global<const std::uint8_t> of_row = mask ? mask + visible.mask_of(row) : mask;
    const auto read = [&](int t) {
      TileBits own = 0;
      if constexpr (documents) {
        own = own_document<N, whole>(visible, row, t, seen);
        tile.load_where(scores + row * keys, t, [&](int k) { return pack_of<N>(own, k) != 0; });
      } else {
        tile.load(scores + row * keys, seen, t);
      }
      return mask_tile<documents>(tile, t, seen, own, scale, of_row, visible.key_stride);
    };
    float largest = kLowest, sums[2] = {0.0f, 0.0f};  // of exponentials, of keys
    for (int t = 0; t < tiles; ++t) {
      sums[1] += read(t);
      const float before = largest;
      Row::each([&](int k, int n) { largest = tile.value[k][n] > largest ? tile.value[k][n] : largest; });
      sums[0] *= expf(before - largest);
      Row::each([&](int k, int n) {
        const float exponential = expf(tile.value[k][n] - largest);
        sums[0] += exponential;
        if (whole) tile.value[k][n] = exponential;
      });
    }
    const float row_largest = row_max(largest), own = expf(largest - row_largest);
    sums[0] *= own;
    row_sums(sums);
    const float factor = sums[1] > 0.0f ? (whole ? own : 1.0f) / sums[0] : 0.0f;
    for (int t = 0; t < tiles; ++t) {
      if (!whole) {
        read(t);
        Row::each([&](int k, int n) { tile.value[k][n] = expf(tile.value[k][n] - row_largest); });
      }
      Row::each([&](int k, int n) { tile.value[k][n] *= factor; });
      tile.store(probs + row * keys, keys, t);
    }
  }
}

// grad_scores = scale * probs * (grad - sum(probs * grad)).
template <typename T, int N, bool whole, bool documents>
__global__ void __launch_bounds__(1024, 1)
    scaled_softmax_backward(std::int64_t count, Visible visible, Global<const T> probs, Global<const T> grad,
                            float scale, Global<T> grad_scores) {
  using Row = Tile<N, whole>;
  const int keys = visible.keys, tiles = Row::count(keys);
  Row prob, tile;
  for (std::int64_t row = first_row(); row < count; row += row_stride()) {
    const int seen = visible.keys_of(row);
    TileBits own = 0;
    const auto read = [&](int t) {
      if constexpr (documents) {
        own = own_document<N, whole>(visible, row, t, seen);
        const auto wanted = [&](int k) { return pack_of<N>(own, k) != 0; };
        prob.load_where(probs + row * keys, t, wanted);
        tile.load_where(grad + row * keys, t, wanted);
      } else {
        prob.load(probs + row * keys, seen, t);
        tile.load(grad + row * keys, seen, t);
      }
    };
    const auto hidden = [&](int t, int k, int n) {
      return documents ? !has<N>(own, k, n) : Row::at(t, k) + n >= seen;
    };
    float sum[1] = {0.0f};
    for (int t = 0; t < tiles; ++t) {
      read(t);
      Row::each([&](int k, int n) {
        // A pack may reach beyond what is seen.
        if (N > 1 && hidden(t, k, n)) prob.value[k][n] = tile.value[k][n] = 0.0f;
        sum[0] += prob.value[k][n] * tile.value[k][n];
      });
    }
    row_sums(sum);
    for (int t = 0; t < tiles; ++t) {
      if (!whole) read(t);
      Row::each([&](int k, int n) {
        const float moved = scale * prob.value[k][n] * (tile.value[k][n] - sum[0]);
        tile.value[k][n] = hidden(t, k, n) ? 0.0f : moved;
      });
      tile.store(grad_scores + row * keys, keys, t);
    }
  }
}

}  // namespace megazero

using namespace megazero;

// Calls start with the pack, whether a row is one tile, and whether there are documents, as constants.
template <typename T, typename Start, typename... Pointers>
int with_softmax_shape(const RowLaunch& launch, const Visible& visible, const Start& start, Pointers... rows) {
  if (visible.document_ids == nullptr) {
    const auto without = [&](auto pack, auto whole) { return start(pack, whole, std::false_type{}); };
    return with_row_shape<T>(launch, visible.keys, without, rows...);
  }
  if (visible.queries > visible.keys) return kInvalidValue;
  const auto within = [&](auto pack, auto whole) { return start(pack, whole, std::true_type{}); };
  return with_row_shape<T>(launch, visible.keys, within, rows..., visible.document_ids);
}

// document_ids: null for none; of id_bytes 4 or 8 each.
extern "C" int megazero_cuda_scaled_softmax_forward(std::int64_t dtype, std::int64_t count, std::int64_t inner,
                                                    std::int64_t queries, std::int64_t keys, std::int64_t causal,
                                                    const void* scores, double scale, const std::uint8_t* mask,
                                                    std::int64_t outer_stride, std::int64_t inner_stride,
                                                    std::int64_t query_stride, std::int64_t key_stride,
                                                    const void* document_ids, std::int64_t id_bytes, void* probs,
                                                    void* stream) {
  if (count == 0 || keys == 0) return 0;
  const RowLaunch launch = row_launch(count, keys);
  const Visible visible{inner, queries, outer_stride, inner_stride, query_stride,
                        key_stride, static_cast<int>(keys), causal != 0, document_ids, id_bytes == 8};
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack, auto whole, auto documents) {
      return MEGAZERO_LAUNCH((scaled_softmax_forward<T, pack(), whole(), documents()>), launch.blocks, launch.threads,
                             0, stream, count, visible, static_cast<const T*>(scores), scale, mask,
                             static_cast<T*>(probs));
    };
    return with_softmax_shape<T>(launch, visible, start, scores, mask, probs);
  });
}
MEGAZERO_EXPORT(scaled_softmax_forward)

extern "C" int megazero_cuda_scaled_softmax_backward(std::int64_t dtype, std::int64_t count, std::int64_t inner,
                                                     std::int64_t queries, std::int64_t keys, std::int64_t causal,
                                                     const void* probs, const void* grad, double scale,
                                                     const void* document_ids, std::int64_t id_bytes,
                                                     void* grad_scores, void* stream) {
  if (count == 0 || keys == 0) return 0;
  const RowLaunch launch = row_launch(count, keys);
  const Visible visible{inner, queries, 0, 0, 0, 0, static_cast<int>(keys), causal != 0, document_ids, id_bytes == 8};
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack, auto whole, auto documents) {
      return MEGAZERO_LAUNCH((scaled_softmax_backward<T, pack(), whole(), documents()>), launch.blocks, launch.threads,
                             0, stream, count, visible, static_cast<const T*>(probs), static_cast<const T*>(grad),
                             scale, static_cast<T*>(grad_scores));
    };
    return with_softmax_shape<T>(launch, visible, start, probs, grad, grad_scores);
  });
}
MEGAZERO_EXPORT(scaled_softmax_backward)
