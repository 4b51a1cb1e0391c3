// Attention of one head in blocks (Dao et al. 2022): forward with a running maximum, backward from the log-sum-exp.
//
// Operands are copied into zero-padded scratch memory first, so that the products (common/product.hpp) need no
// remainders: rows up to a multiple of kQueries or kKeys, channels up to one of kTileColumns.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/cpu.hpp"
#include "attention/visible.hpp"
#include "common/exponential.hpp"
#include "common/numbers.hpp"
#include "common/product.hpp"

namespace megazero::attention {

constexpr std::int64_t kScoreRow = kKeys + 16;  // not a power of two, so that rows fall into different cache sets

MEGAZERO_INLINE constexpr std::int64_t up_to(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// A head's sizes, and those of its scratch memory.
struct Sizes {
  std::int64_t queries, keys, size;
  std::int64_t all_queries, all_keys, row;  // padded
  std::int64_t sharers;                     // heads of a group

  explicit Sizes(const AttentionShape& shape)
      : queries(shape.queries), keys(shape.keys), size(shape.size), all_queries(up_to(shape.queries, kQueries) + kTileRows),
        all_keys(up_to(shape.keys, kKeys)), row(up_to(shape.size, kTileColumns)),
        sharers(shape.heads / shape.groups) {}

  // Keys whose gradients are held: all, if several heads add to them.
  std::int64_t summed_keys() const { return sharers == 1 ? kKeys : all_keys; }

  MEGAZERO_INLINE Right natural(const float* rows) const { return {rows, row, kPanel}; }
  MEGAZERO_INLINE Right transposed(const float* panels) const { return {panels, kPanel, kPanel * row}; }

  // Notes of panels are first in scratch memory.
  std::int64_t notes() const { return up_to(all_keys / kPanel * (sizeof(PanelNote) / sizeof(float)), kTileColumns); }
  std::int64_t forward_scratch() const {
    return notes() + 2 * all_keys * row + 2 * kQueries * row + kQueries * kScoreRow;
  }
  std::int64_t backward_scratch() const {
    return notes() + 3 * kKeys * row + 2 * summed_keys() * row + 3 * all_queries * row + 2 * kQueries * kScoreRow +
           all_queries;
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
MEGAZERO_INLINE void soften(float* scores, Columns seen, std::int64_t count, float& highest, float& total, float* sums,
                            std::int64_t row) {
  float most = highest;
#pragma omp simd reduction(max : most)
  for (std::int64_t j = seen.begin; j < seen.end; ++j) most = scores[j] > most ? scores[j] : most;
  if (most > highest) {
    const float factor = exponential_below(highest - most);
    total *= factor;
    for (std::int64_t c = 0; c < row; ++c) sums[c] *= factor;
    highest = most;
  }
  const float base = most == kNothing ? 0.0f : most;
  float added = 0.0f;
#pragma omp simd reduction(+ : added)
  for (std::int64_t j = seen.begin; j < seen.end; ++j) {
    const float value = exponential_below(scores[j] - base);
    scores[j] = value;
    added += value;
  }
  total += added;
  for (std::int64_t j = 0; j < seen.begin; ++j) scores[j] = 0.0f;
  for (std::int64_t j = seen.end; j < count; ++j) scores[j] = 0.0f;
}

// One block of queries in a forward pass: what is known so far of their results.
struct Softened {
  float highest[kQueries], total[kQueries];
  bool seen[kQueries];  // whether the query's place lets it see any key

  Softened() {
    std::fill(highest, highest + kQueries, kNothing);
    std::fill(total, total + kQueries, 0.0f);
    std::fill(seen, seen + kQueries, false);
  }
};

template <typename Set, typename T, typename Result>
MEGAZERO_INLINE void forward_head(const Sizes& sizes, const Visible& visible, float scale, const T* q,
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
  for (std::int64_t first = 0; first < sizes.queries;) {
    const QueryBlock block = visible.block(first);
    const std::int64_t rows = up_to(block.count, kTileRows);
    Softened state;
    std::fill(sums, sums + kQueries * sizes.row, 0.0f);
    copy_in(q + first * q_row, q_row, block.count, sizes, scale, queries, rows);
    for (std::int64_t start = visible.first_keys(block); start < block.end; start += kKeys) {
      visible.runs(block, start, [&](std::int64_t at, std::int64_t columns) MEGAZERO_INLINE_LAMBDA {
        product<Set, false>(rows, columns, sizes.size, {queries, sizes.row, 1}, sizes.transposed(keys + at * sizes.row),
                            scores, kScoreRow);
        const bool holes = visible.holes(block, at, columns);
        for (std::int64_t i = 0; i < block.count; ++i) {
          float* row = scores + i * kScoreRow;
          const Columns seen = visible.restrict_row(row, block, first + i, at, columns, holes);
          state.seen[i] |= seen.end > seen.begin;
          soften(row, seen, columns, state.highest[i], state.total[i], sums + i * sizes.row, sizes.row);
          if (!visible.drops()) continue;
          const KeepRow keep = visible.dropped(first + i, at);
#pragma omp simd
          for (std::int64_t j = seen.begin; j < seen.end; ++j) row[j] *= keep(j);
        }
        product<Set, true>(rows, sizes.row, columns, {scores, kScoreRow, 1}, sizes.natural(values + at * sizes.row),
                           sums, sizes.row);
      });
    }
    for (std::int64_t i = 0; i < block.count; ++i) {
      // A total of 0 of visible keys means that all scores were -inf, which gives NaN.
      const bool nothing = state.total[i] == 0.0f && (visible.hides() || !state.seen[i]);
      copy_out(sums + i * sizes.row, 1, sizes, nothing ? 0.0f : 1.0f / state.total[i], out + (first + i) * out_row,
               out_row);
      lse[first + i] = nothing ? kNothing : state.highest[i] + std::log(state.total[i]);
    }
    first += block.count;
  }
}

// Scratch memory of a group's backward.
struct Backward {
  float *keys, *keys_turned, *values_turned;  // [kKeys, row], the current block
  float *grad_k, *grad_v;                     // [summed_keys, row]
  float *queries, *grads, *grad_q;            // [all_queries, row]
  float *probabilities, *grad_scores;         // [kQueries, kScoreRow]
  float* delta;                               // [all_queries]

  Backward(const Sizes& sizes, float* scratch) {
    const auto take = [&scratch](std::int64_t count) {
      float* from = scratch;
      scratch += count;
      return from;
    };
    for (float** each : {&keys, &keys_turned, &values_turned}) *each = take(kKeys * sizes.row);
    for (float** each : {&grad_k, &grad_v}) *each = take(sizes.summed_keys() * sizes.row);
    for (float** each : {&queries, &grads, &grad_q}) *each = take(sizes.all_queries * sizes.row);
    probabilities = take(kQueries * kScoreRow);
    grad_scores = take(kQueries * kScoreRow);
    delta = take(sizes.all_queries);
  }

  // Reads a block of keys and values.
  template <typename T>
  MEGAZERO_INLINE void read(const Sizes& sizes, const T* k, std::int64_t k_row, const T* v, std::int64_t v_row,
                            std::int64_t start) {
    const std::int64_t count = std::min(kKeys, sizes.keys - start);
    copy_in(v + start * v_row, v_row, count, sizes, 1.0f, keys, kKeys);
    transpose(keys, kKeys, sizes.row, values_turned);
    copy_in(k + start * k_row, k_row, count, sizes, 1.0f, keys, kKeys);
    transpose(keys, kKeys, sizes.row, keys_turned);
  }
};

// One query's scores and gradients of probabilities become what the value and the score get: the probability with its
// dropout, and p (keep * grad - delta).
MEGAZERO_INLINE void differentiate(const Visible& visible, float* scores, float* grads, std::int64_t query,
                                   std::int64_t first, Columns seen, std::int64_t count, float lse, float delta) {
  if (!visible.drops()) {
#pragma omp simd
    for (std::int64_t j = seen.begin; j < seen.end; ++j) {
      const float p = exponential_below(scores[j] - lse);
      scores[j] = p;
      grads[j] = p * (grads[j] - delta);
    }
  } else {
    const KeepRow keep = visible.dropped(query, first);
#pragma omp simd
    for (std::int64_t j = seen.begin; j < seen.end; ++j) {
      const float p = exponential_below(scores[j] - lse);
      const float times = keep(j);
      scores[j] = p * times;
      grads[j] = p * (grads[j] * times - delta);
    }
  }
  for (std::int64_t j = 0; j < seen.begin; ++j) scores[j] = grads[j] = 0.0f;
  for (std::int64_t j = seen.end; j < count; ++j) scores[j] = grads[j] = 0.0f;
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

// Adds a head's share of the gradients of the block of keys in memory to grad_k and grad_v [kKeys, row], and to grad_q.
template <typename Set>
MEGAZERO_INLINE void backward_block(const Sizes& sizes, const Visible& visible, const float* lse, std::int64_t start,
                                    float* grad_k, float* grad_v, Backward& memory) {
  for (std::int64_t first = 0; first < sizes.queries;) {
    const QueryBlock block = visible.block(first);
    first += block.count;
    if (start >= block.end || start < visible.first_keys(block)) continue;
    const std::int64_t rows = up_to(block.count, kTileRows);
    const float* queries = memory.queries + block.first * sizes.row;
    const float* grads = memory.grads + block.first * sizes.row;
    float *p = memory.probabilities, *ds = memory.grad_scores;
    visible.runs(block, start, [&](std::int64_t key, std::int64_t columns) MEGAZERO_INLINE_LAMBDA {
      const std::int64_t at = (key - start) * sizes.row;
      product<Set, false>(rows, columns, sizes.size, {queries, sizes.row, 1}, sizes.transposed(memory.keys_turned + at),
                          p, kScoreRow);
      product<Set, false>(rows, columns, sizes.size, {grads, sizes.row, 1}, sizes.transposed(memory.values_turned + at),
                          ds, kScoreRow);
      const bool holes = visible.holes(block, key, columns);
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t query = block.first + i;
        const bool real = i < block.count && lse[query] != kNothing;
        float *row = p + i * kScoreRow, *grad_row = ds + i * kScoreRow;
        const Columns seen = real ? visible.restrict_row(row, block, query, key, columns, holes) : Columns{0, 0};
        differentiate(visible, row, grad_row, query, key, seen, columns, real ? lse[query] : 0.0f,
                      real ? memory.delta[query] : 0.0f);
      }
      product<Set, true>(columns, sizes.row, rows, {p, 1, kScoreRow}, sizes.natural(grads), grad_v + at, sizes.row);
      product<Set, true>(columns, sizes.row, rows, {ds, 1, kScoreRow}, sizes.natural(queries), grad_k + at, sizes.row);
      product<Set, true>(rows, sizes.row, columns, {ds, kScoreRow, 1}, sizes.natural(memory.keys + at),
                         memory.grad_q + block.first * sizes.row, sizes.row);
    });
  }
}

}  // namespace megazero::attention
