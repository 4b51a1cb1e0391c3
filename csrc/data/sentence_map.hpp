// The sample map of a BERT dataset: which sentences make which sample.
//
// Twin of `sample_map_reference` in megazero/data/bert/sample_map.py, which says what the numbers mean.
#pragma once

#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "data/unaligned.hpp"

namespace megazero::data {

// num_samples: -1 for exactly `epochs` epochs. short_ratio: 0 for full targets only.
struct MapPlan {
  std::int64_t num_samples;
  std::int64_t epochs;
  std::int64_t target;
  std::int64_t min_sentences;
  std::int64_t short_ratio;
  std::uint64_t seed;
  std::int64_t longest_sentence;
};

// Draws the targets of samples one after another.
class Targets {
 public:
  explicit Targets(const MapPlan& plan)
      : random_(static_cast<std::uint32_t>(plan.seed)), target_(plan.target), ratio_(plan.short_ratio) {}

  std::int64_t next() {
    if (ratio_ == 0) {
      return target_;
    }
    const auto draw = static_cast<std::int64_t>(random_());
    return draw % ratio_ == 0 ? 2 + draw % (target_ - 1) : target_;
  }

 private:
  std::mt19937 random_;
  std::int64_t target_;
  std::int64_t ratio_;
};

// Appends the rows of one document, the sentences [first, end), if it is usable.
template <typename Row>
void pack_document(const Unaligned<std::int32_t>& lengths, std::int64_t first, std::int64_t end, const MapPlan& plan,
                   Targets& targets, std::vector<Row>& rows) {
  if (end - first < plan.min_sentences || end == first) {
    return;
  }
  if (end - first > 1) {
    for (std::int64_t sentence = first; sentence < end; ++sentence) {
      if (lengths[sentence] > plan.longest_sentence) {
        return;
      }
    }
  }
  std::int64_t target = targets.next();
  std::int64_t tokens = 0;
  std::int64_t begin = first;
  for (std::int64_t sentence = first; sentence < end; ++sentence) {
    tokens += lengths[sentence];
    const std::int64_t left = end - sentence - 1;
    const std::int64_t taken = sentence + 1 - begin;
    if (left == 0 || (tokens >= target && left > 1 && taken >= plan.min_sentences)) {
      rows.push_back(static_cast<Row>(begin));
      rows.push_back(static_cast<Row>(sentence + 1));
      rows.push_back(static_cast<Row>(target));
      target = targets.next();
      tokens = 0;
      begin = sentence + 1;
    }
  }
}

// All rows (first sentence, end, target), shuffled. Throws std::out_of_range if a document names a sentence that is
// not there, and std::invalid_argument if no document is usable.
template <typename Row>
std::vector<Row> build_sentence_map(const Unaligned<std::int32_t>& lengths, const Unaligned<std::int64_t>& boundaries,
                                    const MapPlan& plan) {
  const std::int64_t documents = boundaries.size() - 1;
  for (std::int64_t d = 0; d <= documents; ++d) {
    if (boundaries[d] < (d == 0 ? 0 : boundaries[d - 1]) || boundaries[d] > lengths.size()) {
      throw std::out_of_range("a document names sentences that do not exist");
    }
  }
  std::vector<Row> rows;
  Targets targets(plan);
  const auto reached = [&](std::int64_t epoch) {
    return plan.num_samples < 0 ? epoch >= plan.epochs
                                : static_cast<std::int64_t>(rows.size() / 3) >= plan.num_samples;
  };
  for (std::int64_t epoch = 0; !reached(epoch); ++epoch) {
    for (std::int64_t d = 0; d < documents; ++d) {
      pack_document<Row>(lengths, boundaries[d], boundaries[d + 1], plan, targets, rows);
    }
    if (rows.empty()) {
      throw std::invalid_argument("no document is usable");
    }
  }
  std::mt19937_64 random(plan.seed + 1);
  for (std::size_t i = rows.size() / 3 - 1; i > 0; --i) {
    const std::size_t j = random() % (i + 1);
    for (std::size_t k = 0; k < 3; ++k) {
      std::swap(rows[3 * i + k], rows[3 * j + k]);
    }
  }
  return rows;
}

}  // namespace megazero::data
