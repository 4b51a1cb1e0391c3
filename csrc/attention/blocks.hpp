// Attention of one head in blocks (Dao et al. 2022): forward with a running maximum, backward from the log-sum-exp.
//
// Operands are copied into zero-padded scratch memory first, so that the products (common/product.hpp) need no
// remainders: rows up to a multiple of kQueries or kKeys, channels up to one of kTileColumns.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu.hpp"
#include "common/exponential.hpp"
#include "common/keep.hpp"
#include "common/numbers.hpp"
#include "common/product.hpp"

namespace megazero::attention {

// Queries and keys of a block. Fewer queries waste less beyond the causal diagonal; more let products run longer. A
// block's keys, values and their gradients stay in a second-level cache.
constexpr std::int64_t kQueries = 64;
constexpr std::int64_t kKeys = 128;
constexpr std::int64_t kScoreRow = kKeys + 16;  // not a power of two, so that rows fall into different cache sets

constexpr float kNothing = -std::numeric_limits<float>::infinity();

MEGAZERO_INLINE constexpr std::int64_t up_to(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// A head's sizes, and those of its scratch memory.
struct Sizes {
  std::int64_t queries, keys, size;
  std::int64_t all_queries, all_keys, row;  // padded
  bool causal;

  explicit Sizes(const AttentionShape& shape)
      : queries(shape.queries), keys(shape.keys), size(shape.size), all_queries(up_to(shape.queries, kQueries)),
        all_keys(up_to(shape.keys, kKeys)), row(up_to(shape.size, kTileColumns)), causal(shape.causal) {}

  // How many keys of the block from `first` the query sees.
  MEGAZERO_INLINE std::int64_t seen(std::int64_t query, std::int64_t first) const {
    const std::int64_t last = causal ? std::min(keys, query + 1 + keys - queries) : keys;
    return std::max<std::int64_t>(0, std::min(kKeys, last - first));
  }

  // And how many columns its block of queries needs.
  MEGAZERO_INLINE std::int64_t columns(std::int64_t first_query, std::int64_t first_key) const {
    const std::int64_t last = std::min(first_query + kQueries, queries) - 1;
    return up_to(seen(last, first_key), kPanel);
  }

  MEGAZERO_INLINE Right natural(const float* rows) const { return {rows, row, kPanel}; }
  MEGAZERO_INLINE Right transposed(const float* panels) const { return {panels, kPanel, kPanel * row}; }

  std::int64_t forward_scratch() const { return 2 * all_keys * row + 2 * kQueries * row + kQueries * kScoreRow; }
  std::int64_t backward_scratch() const {
    return 5 * all_keys * row + 3 * all_queries * row + 2 * kQueries * kScoreRow + all_queries;
  }
};

// The limits of one head.
struct HeadLimits {
  const std::uint8_t* mask;
  std::int64_t mask_query;
  Keep keep;
  bool drops;

  HeadLimits(const AttentionShape& shape, const AttentionLimits& all, std::int64_t sample, std::int64_t head)
      : mask(all.mask == nullptr ? nullptr : all.mask + sample * all.mask_sample + head * all.mask_head),
        mask_query(all.mask_query), keep(all.keep), drops(all.keep.low != nullptr) {
    if (!drops) return;
    keep.low += (sample * shape.heads + head) * shape.queries;
    keep.odd_high += (sample * shape.heads + head) * shape.queries;
    keep.columns += sample * all.column_sample;
  }

  // -inf for the scores [count] of a query and the keys from `first` on that it must not attend to.
  MEGAZERO_INLINE void forbid(float* scores, std::int64_t query, std::int64_t first, std::int64_t count) const {
    if (mask == nullptr) return;
    const std::uint8_t* allowed = mask + query * mask_query + first;
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) scores[j] = allowed[j] ? scores[j] : kNothing;
  }

  // What is dropped of a query's probabilities of the keys from `first` on.
  MEGAZERO_INLINE KeepRow dropped(std::int64_t query, std::int64_t first) const {
    KeepRow row = keep.row(query);
    row.columns += first;
    return row;
  }
};

// Rows [count, size] times `factor` as floats [all, row], zero-padded.
template <typename T>
MEGAZERO_INLINE void copy_in(const T* from, std::int64_t distance, std::int64_t count, const Sizes& sizes, float factor,
                             float* to, std::int64_t all) {
  for (std::int64_t i = 0; i < count; ++i) {
    const T* row = from + i * distance;
    float* into = to + i * sizes.row;
#pragma omp simd
    for (std::int64_t c = 0; c < sizes.size; ++c) into[c] = load(row + c) * factor;
    for (std::int64_t c = sizes.size; c < sizes.row; ++c) into[c] = 0.0f;
  }
  std::fill(to + count * sizes.row, to + all * sizes.row, 0.0f);
}

// The transpose of padded rows [count, row], count a multiple of kPanel, as panels of kPanel columns.
MEGAZERO_INLINE void transpose(const float* from, std::int64_t count, std::int64_t row, float* to) {
  for (std::int64_t first = 0; first < count; first += kPanel) {
    for (std::int64_t c = 0; c < row; ++c) {
      for (std::int64_t j = 0; j < kPanel; ++j) to[first * row + c * kPanel + j] = from[(first + j) * row + c];
    }
  }
}

template <typename T>
MEGAZERO_INLINE void copy_out(const float* from, std::int64_t count, const Sizes& sizes, float factor, T* to,
                              std::int64_t distance) {
  for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
    for (std::int64_t c = 0; c < sizes.size; ++c) store(from[i * sizes.row + c] * factor, to + i * distance + c);
  }
}

// One query's scores of a block become exponentials below the running maximum, which may rise: its earlier sums [row]
// and their total are scaled down then.
MEGAZERO_INLINE void soften(float* scores, std::int64_t seen, std::int64_t columns, float& highest, float& total,
                            float* sums, std::int64_t row) {
  float most = highest;
#pragma omp simd reduction(max : most)
  for (std::int64_t j = 0; j < seen; ++j) most = scores[j] > most ? scores[j] : most;
  if (most > highest) {
    const float factor = exponential_below(highest - most);
    total *= factor;
    for (std::int64_t c = 0; c < row; ++c) sums[c] *= factor;
    highest = most;
  }
  const float base = most == kNothing ? 0.0f : most;
  float added = 0.0f;
#pragma omp simd reduction(+ : added)
  for (std::int64_t j = 0; j < seen; ++j) {
    const float value = exponential_below(scores[j] - base);
    scores[j] = value;
    added += value;
  }
  total += added;
  for (std::int64_t j = seen; j < columns; ++j) scores[j] = 0.0f;
}

template <typename Set, typename T, typename Result>
MEGAZERO_INLINE void forward_head(const Sizes& sizes, const HeadLimits& limits, float scale, const T* q,
                                  std::int64_t q_row, const T* k, std::int64_t k_row, const T* v, std::int64_t v_row,
                                  Result* out, std::int64_t out_row, float* lse, float* scratch) {
  float* keys = scratch;
  float* values = keys + sizes.all_keys * sizes.row;
  float* queries = values + sizes.all_keys * sizes.row;
  float* sums = queries + kQueries * sizes.row;
  float* scores = sums + kQueries * sizes.row;
  copy_in(k, k_row, sizes.keys, sizes, 1.0f, values, sizes.all_keys);
  transpose(values, sizes.all_keys, sizes.row, keys);
  copy_in(v, v_row, sizes.keys, sizes, 1.0f, values, sizes.all_keys);
  for (std::int64_t first = 0; first < sizes.queries; first += kQueries) {
    const std::int64_t count = std::min(kQueries, sizes.queries - first);
    const std::int64_t rows = up_to(count, kTileRows);
    float highest[kQueries], total[kQueries];
    std::fill(highest, highest + kQueries, kNothing);
    std::fill(total, total + kQueries, 0.0f);
    std::fill(sums, sums + kQueries * sizes.row, 0.0f);
    copy_in(q + first * q_row, q_row, count, sizes, scale, queries, rows);
    for (std::int64_t start = 0; start < sizes.keys; start += kKeys) {
      const std::int64_t columns = sizes.columns(first, start);
      if (columns == 0) break;
      product<Set, false>(rows, columns, sizes.size, {queries, sizes.row, 1},
                          sizes.transposed(keys + start * sizes.row), scores, kScoreRow);
      for (std::int64_t i = 0; i < count; ++i) {
        float* row = scores + i * kScoreRow;
        const std::int64_t seen = sizes.seen(first + i, start);
        limits.forbid(row, first + i, start, seen);
        soften(row, seen, columns, highest[i], total[i], sums + i * sizes.row, sizes.row);
        if (!limits.drops) continue;
        const KeepRow keep = limits.dropped(first + i, start);
#pragma omp simd
        for (std::int64_t j = 0; j < seen; ++j) row[j] *= keep(j);
      }
      product<Set, true>(rows, sizes.row, columns, {scores, kScoreRow, 1}, sizes.natural(values + start * sizes.row),
                         sums, sizes.row);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      // A total of 0 without a mask means that all scores were -inf, which gives NaN.
      const bool nothing = total[i] == 0.0f && (limits.mask != nullptr || sizes.seen(first + i, 0) == 0);
      copy_out(sums + i * sizes.row, 1, sizes, nothing ? 0.0f : 1.0f / total[i], out + (first + i) * out_row, out_row);
      lse[first + i] = nothing ? kNothing : highest[i] + std::log(total[i]);
    }
  }
}

// Scratch memory of a group's backward.
struct Backward {
  float *keys, *keys_turned, *values_turned, *grad_k, *grad_v;  // [all_keys, row]
  float *queries, *grads, *grad_q;                               // [all_queries, row]
  float *probabilities, *grad_scores;                            // [kQueries, kScoreRow]
  float* delta;                                                  // [all_queries]

  Backward(const Sizes& sizes, float* scratch) {
    const auto take = [&scratch](std::int64_t count) {
      float* from = scratch;
      scratch += count;
      return from;
    };
    for (float** each : {&keys, &keys_turned, &values_turned, &grad_k, &grad_v}) {
      *each = take(sizes.all_keys * sizes.row);
    }
    for (float** each : {&queries, &grads, &grad_q}) *each = take(sizes.all_queries * sizes.row);
    probabilities = take(kQueries * kScoreRow);
    grad_scores = take(kQueries * kScoreRow);
    delta = take(sizes.all_queries);
  }
};

// One query's scores and gradients of probabilities become what the value and the score get: the probability with its
// dropout, and p (keep * grad - delta).
MEGAZERO_INLINE void differentiate(const HeadLimits& limits, float* scores, float* grads, std::int64_t query,
                                   std::int64_t start, std::int64_t seen, std::int64_t columns, float lse,
                                   float delta) {
  limits.forbid(scores, query, start, seen);
  if (!limits.drops) {
#pragma omp simd
    for (std::int64_t j = 0; j < seen; ++j) {
      const float p = exponential_below(scores[j] - lse);
      scores[j] = p;
      grads[j] = p * (grads[j] - delta);
    }
  } else {
    const KeepRow keep = limits.dropped(query, start);
#pragma omp simd
    for (std::int64_t j = 0; j < seen; ++j) {
      const float p = exponential_below(scores[j] - lse);
      const float times = keep(j);
      scores[j] = p * times;
      grads[j] = p * (grads[j] * times - delta);
    }
  }
  for (std::int64_t j = seen; j < columns; ++j) scores[j] = grads[j] = 0.0f;
}

// delta = sum over channels of grad out, less grad_lse: a score's probability is the derivative of lse by it.
template <typename T>
MEGAZERO_INLINE void row_terms(const T* out, std::int64_t out_row, const Sizes& sizes, const float* grads,
                                   const float* grad_lse, float* delta) {
  for (std::int64_t i = 0; i < sizes.queries; ++i) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t c = 0; c < sizes.size; ++c) sum += grads[i * sizes.row + c] * load(out + i * out_row + c);
    delta[i] = grad_lse == nullptr ? sum : sum - grad_lse[i];
  }
}

// Adds one head's share to grad_k and grad_v, and computes grad_q. Rows of queries beyond the last are zeros.
template <typename Set>
MEGAZERO_INLINE void backward_head(const Sizes& sizes, const HeadLimits& limits, const float* lse, Backward& memory) {
  std::fill(memory.grad_q, memory.grad_q + sizes.all_queries * sizes.row, 0.0f);
  for (std::int64_t start = 0; start < sizes.keys; start += kKeys) {
    const std::int64_t at = start * sizes.row;
    for (std::int64_t first = 0; first < sizes.queries; first += kQueries) {
      const std::int64_t columns = sizes.columns(first, start);
      if (columns == 0) continue;
      const std::int64_t count = std::min(kQueries, sizes.queries - first);
      const std::int64_t rows = up_to(count, kTileRows);
      const float* queries = memory.queries + first * sizes.row;
      const float* grads = memory.grads + first * sizes.row;
      float *p = memory.probabilities, *ds = memory.grad_scores;
      product<Set, false>(rows, columns, sizes.size, {queries, sizes.row, 1},
                          sizes.transposed(memory.keys_turned + at), p, kScoreRow);
      product<Set, false>(rows, columns, sizes.size, {grads, sizes.row, 1},
                          sizes.transposed(memory.values_turned + at), ds, kScoreRow);
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t query = first + i;
        const bool real = i < count && lse[query] != kNothing;
        differentiate(limits, p + i * kScoreRow, ds + i * kScoreRow, query, start, real ? sizes.seen(query, start) : 0,
                      columns, real ? lse[query] : 0.0f, real ? memory.delta[query] : 0.0f);
      }
      product<Set, true>(columns, sizes.row, rows, {p, 1, kScoreRow}, sizes.natural(grads), memory.grad_v + at,
                         sizes.row);
      product<Set, true>(columns, sizes.row, rows, {ds, 1, kScoreRow}, sizes.natural(queries), memory.grad_k + at,
                         sizes.row);
      product<Set, true>(rows, sizes.row, columns, {ds, kScoreRow, 1}, sizes.natural(memory.keys + at),
                         memory.grad_q + first * sizes.row, sizes.row);
    }
  }
}

}  // namespace megazero::attention
