// Which keys the queries of one head see: by place, document, block and mask. Keys are counted from the first one given;
// a query's own key is the one at its place, given or not.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/cpu.hpp"
#include "common/keep.hpp"
#include "common/product.hpp"

namespace megazero::attention {

// Queries and keys of a block. Fewer queries waste less beyond the causal diagonal; more let products run longer. A
// block's keys, values and their gradients stay in a second-level cache.
constexpr std::int64_t kQueries = 64;
constexpr std::int64_t kKeys = 128;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What is to be known of a panel of keys before any of it is read: the range of its documents, and whether it has sinks.
struct PanelNote {
  std::int64_t lowest, highest, sinks;
};

// Neighboring queries, which are in one row of blocks if there is a layout.
struct QueryBlock {
  std::int64_t first, count;
  std::int64_t begin, end;       // the keys that any of them sees by its place, sinks aside
  std::int64_t lowest, highest;  // their documents
  const std::uint8_t* blocks;    // of keys, that they may see
};

// Columns of a block of scores.
struct Columns {
  std::int64_t begin, end;
};

struct Visible {
  const AttentionLimits& all;
  std::int64_t queries, keys;
  const std::uint8_t *mask, *sinks, *blocks;
  const std::int64_t *query_ids, *key_ids;
  PanelNote* notes;  // of the sample's panels
  float slope;
  bool plain;  // whether places alone decide what a query sees
  Keep keep;

  Visible(const AttentionShape& shape, const AttentionLimits& limits, std::int64_t sample, std::int64_t head,
          PanelNote* noted)
      : all(limits), queries(shape.queries), keys(shape.keys), mask(nullptr), sinks(nullptr), blocks(nullptr),
        query_ids(nullptr), key_ids(nullptr), notes(noted), slope(0.0f), plain(true), keep(limits.keep) {
    if (all.mask != nullptr) mask = all.mask + sample * all.mask_sample + head * all.mask_head;
    if (all.sinks != nullptr) sinks = all.sinks + sample * all.sinks_sample;
    if (all.blocks != nullptr) blocks = all.blocks + head * all.blocks_head;
    if (all.query_ids != nullptr) query_ids = all.query_ids + sample * queries;
    if (all.key_ids != nullptr) key_ids = all.key_ids + sample * keys;
    if (all.slopes != nullptr) slope = all.slopes[head];
    plain = !hides() && slope == 0.0f;
    if (keep.low == nullptr) return;
    keep.low += (sample * shape.heads + head) * shape.queries;
    keep.odd_high += (sample * shape.heads + head) * shape.queries;
    keep.columns += sample * all.column_sample;
  }

  // Fills the notes, which all heads of a sample share.
  MEGAZERO_INLINE void note_panels() const {
    if (sinks == nullptr && key_ids == nullptr) return;
    for (std::int64_t first = 0; first < keys; first += kPanel) {
      PanelNote note{std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min(), 0};
      for (std::int64_t key = first; key < std::min(first + kPanel, keys); ++key) {
        if (sinks != nullptr) note.sinks |= sinks[key];
        if (key_ids == nullptr) continue;
        note.lowest = std::min(note.lowest, key_ids[key]);
        note.highest = std::max(note.highest, key_ids[key]);
      }
      notes[first / kPanel] = note;
    }
  }

  // Whether a query may see nothing although its place allows it to.
  MEGAZERO_INLINE bool hides() const {
    return mask != nullptr || sinks != nullptr || key_ids != nullptr || blocks != nullptr;
  }

  // The first key that a query sees by its place, sinks aside, and the one after the last.
  MEGAZERO_INLINE std::int64_t begin(std::int64_t query) const {
    return std::max<std::int64_t>(0, query + all.shift - all.left);
  }
  MEGAZERO_INLINE std::int64_t end(std::int64_t query) const {
    const std::int64_t own = query + all.shift, near = own + all.right + 1;
    return std::max<std::int64_t>(0, std::min(keys, own < all.prefix ? std::max(near, all.prefix) : near));
  }

  MEGAZERO_INLINE QueryBlock block(std::int64_t first) const {
    QueryBlock made{first, std::min(kQueries, queries - first), begin(first), 0, 0, 0, nullptr};
    if (blocks != nullptr) {
      const std::int64_t place = all.query_place + first;
      made.count = std::min(made.count, all.block - place % all.block);
      made.blocks = blocks + place / all.block * all.blocks_row;
    }
    made.end = end(first + made.count - 1);
    if (query_ids != nullptr) {
      const auto of = std::minmax_element(query_ids + first, query_ids + first + made.count);
      made.lowest = *of.first;
      made.highest = *of.second;
    }
    return made;
  }

  // The first block of keys that the queries may see.
  MEGAZERO_INLINE std::int64_t first_keys(const QueryBlock& of) const {
    return sinks != nullptr ? 0 : of.begin / kKeys * kKeys;
  }

  // Whether any of the keys [key, key + count) is in a block that the queries may see, and whether any is not.
  MEGAZERO_INLINE bool some(const QueryBlock& of, std::int64_t key, std::int64_t count, bool allowed) const {
    const std::int64_t last = all.key_place + std::min(key + count, keys) - 1;
    for (std::int64_t j = (all.key_place + key) / all.block; j <= last / all.block; ++j) {
      if ((of.blocks[j] != 0) == allowed) return true;
    }
    return false;
  }

  // Calls body(first key, number of keys) on runs of panels that some of the queries may see, in the block of keys from
  // `start` on.
  template <typename Body>
  MEGAZERO_INLINE void runs(const QueryBlock& of, std::int64_t start, const Body& body) const {
    if (blocks != nullptr && !some(of, start, kKeys, true)) return;
    std::int64_t from = start;  // where the current run begins
    for (std::int64_t at = start; at < start + kKeys; at += kPanel) {
      const bool seen = sees(of, at);
      // With sinks a block is one run or none: which panels lie between them and the window is a matter of the block's
      // other queries, on which the order of a query's sums must not depend.
      if (seen && sinks != nullptr) return body(start, kKeys);
      if (seen) continue;
      if (at > from && sinks == nullptr) body(from, at - from);
      from = at + kPanel;
    }
    if (start + kKeys > from && sinks == nullptr) body(from, start + kKeys - from);
  }

  // Whether some of the queries may see any of the panel of keys from `at` on.
  MEGAZERO_INLINE bool sees(const QueryBlock& of, std::int64_t at) const {
    if (at >= of.end || (at + kPanel <= of.begin && (sinks == nullptr || notes[at / kPanel].sinks == 0))) return false;
    if (query_ids != nullptr) {
      const PanelNote& note = notes[at / kPanel];
      if (note.highest < of.lowest || note.lowest > of.highest) return false;
    }
    return blocks == nullptr || some(of, at, kPanel, true);
  }

  // Adds the biases of a query to its scores of the keys from `first` on, makes those -inf that it does not see, and
  // returns the columns that may be others. `holes`: whether there are blocks that it must not see.
  MEGAZERO_INLINE Columns restrict_row(float* scores, const QueryBlock& of, std::int64_t query, std::int64_t first,
                                       std::int64_t count, bool holes) const {
    const std::int64_t stop = std::max<std::int64_t>(0, std::min(end(query) - first, count));
    std::int64_t from = std::max<std::int64_t>(0, std::min(begin(query) - first, stop));
    if (plain) return {from, stop};
    if (sinks != nullptr && from > 0) {
      for (std::int64_t j = 0; j < from; ++j) scores[j] = sinks[first + j] ? scores[j] : kNothing;
      from = 0;
    }
    if (slope != 0.0f) {
      const auto distance = static_cast<std::int32_t>(first - query - all.shift);
#pragma omp simd
      for (std::int64_t j = from; j < stop; ++j) {
        scores[j] += slope * static_cast<float>(distance + static_cast<std::int32_t>(j));
      }
    }
    if (key_ids != nullptr) {
      const std::int64_t own = query_ids[query];
      const std::int64_t* ids = key_ids + first;
#pragma omp simd
      for (std::int64_t j = from; j < stop; ++j) scores[j] = ids[j] == own ? scores[j] : kNothing;
    }
    if (holes) {
      const std::int64_t place = all.key_place + first;
      for (std::int64_t j = from; j < stop;) {
        const std::int64_t block = (place + j) / all.block;
        const std::int64_t next = std::min(stop, (block + 1) * all.block - place);
        if (of.blocks[block] == 0) std::fill(scores + j, scores + next, kNothing);
        j = next;
      }
    }
    if (mask != nullptr) {
      const std::uint8_t* allowed = mask + query * all.mask_query + first;
#pragma omp simd
      for (std::int64_t j = from; j < stop; ++j) scores[j] = allowed[j] ? scores[j] : kNothing;
    }
    return {from, stop};
  }

  MEGAZERO_INLINE bool holes(const QueryBlock& of, std::int64_t first, std::int64_t count) const {
    return blocks != nullptr && some(of, first, count, false);
  }

  // What is dropped of a query's probabilities of the keys from `first` on.
  MEGAZERO_INLINE bool drops() const { return keep.low != nullptr; }
  MEGAZERO_INLINE KeepRow dropped(std::int64_t query, std::int64_t first) const {
    KeepRow row = keep.row(query);
    row.columns += first;
    return row;
  }
};

}  // namespace megazero::attention
