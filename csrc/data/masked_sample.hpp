// From the sentences of a BERT sample to its arrays.
//
// Twin of `sample_reference` in megazero/data/bert/sample.py and of masking.py beside it, which say what is done and
// why; the order of random draws is theirs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "data/gather.hpp"
#include "data/numpy_random.hpp"
#include "data/unaligned.hpp"

namespace megazero::data {

struct SentenceStore {
  const char* tokens;
  std::int64_t token_bytes;
  Unaligned<std::int32_t> lengths;
  Unaligned<std::int64_t> offsets;
};

struct Vocabulary {
  std::int64_t cls;
  std::int64_t sep;
  std::int64_t mask;
  std::int64_t pad;
  const bool* continues;
  std::int64_t size;
  const std::int64_t* replacements;
  std::int64_t replacement_count;
};

// run_chances: cumulative, of runs of 1, 2 and 3 words.
struct Recipe {
  std::int64_t length;
  double mask_prob;
  const double* run_chances;
  bool two_segments;
};

// Where a sample goes: rows of the arrays of the batch, already filled with [PAD], 0, -1 and 0.
struct SampleRow {
  std::int64_t* tokens;
  std::int64_t* types;
  std::int64_t* labels;
  float* loss_mask;
  std::int64_t* length;
  std::int64_t* swapped;
  std::int64_t* truncated;
};

// Tokens [begin, end) of the sentences [first, last) laid end to end.
struct Segment {
  std::int64_t first;
  std::int64_t last;
  std::int64_t begin;
  std::int64_t end;

  std::int64_t size() const { return end - begin; }
};

// Makes samples one after another; the scratch memory is kept between them.
template <typename Token>
class SampleMaker {
 public:
  SampleMaker(const SentenceStore& store, const Vocabulary& words, const Recipe& recipe)
      : store_(store), words_(words), recipe_(recipe) {}

  // source: a row of the sample map. Throws std::out_of_range if it does not fit the store.
  void make(const std::int64_t* source, std::uint32_t seed, const SampleRow& out) {
    const std::int64_t first = source[0], last = source[1], target = source[2];
    if (first < 0 || last <= first || last > store_.lengths.size() || target < 1 || target + 3 > recipe_.length ||
        (recipe_.two_segments && last - first < 2)) {
      throw std::out_of_range("a row of the sample map does not fit the dataset");
    }
    NumpyRandom random(seed);
    const bool swapped = choose_segments(first, last, random);
    const bool truncated = shorten(target, random);
    const std::int64_t length = lay_out(out);
    mask(length, target, random, out);
    *out.length = length;
    *out.swapped = swapped;
    *out.truncated = truncated;
  }

  const IdRange& range() const { return range_; }

 private:
  Segment whole(std::int64_t first, std::int64_t last) const {
    std::int64_t size = 0;
    for (std::int64_t sentence = first; sentence < last; ++sentence) {
      size += store_.lengths[sentence];
    }
    return Segment{first, last, 0, size};
  }

  bool choose_segments(std::int64_t first, std::int64_t last, NumpyRandom& random) {
    std::int64_t pivot = last;
    if (recipe_.two_segments) {
      const std::int64_t count = last - first;
      pivot = first + 1 + (count > 2 ? random.below(static_cast<std::uint32_t>(count - 1)) : 0);
    }
    a_ = whole(first, pivot);
    b_ = whole(pivot, last);
    const bool swapped = recipe_.two_segments && random.real() < 0.5;
    if (swapped) {
      std::swap(a_, b_);
    }
    return swapped;
  }

  bool shorten(std::int64_t target, NumpyRandom& random) {
    if (a_.size() + b_.size() <= target) {
      return false;
    }
    while (a_.size() + b_.size() > target) {
      Segment& longer = a_.size() > b_.size() ? a_ : b_;
      if (random.real() < 0.5) {
        ++longer.begin;
      } else {
        --longer.end;
      }
    }
    return true;
  }

  // Writes [CLS] A [SEP] B [SEP] and the types; returns the length.
  std::int64_t lay_out(const SampleRow& out) {
    std::int64_t* to = out.tokens;
    *to++ = words_.cls;
    to = copy(a_, to);
    *to++ = words_.sep;
    const std::int64_t begin_b = to - out.tokens;
    if (b_.size() > 0) {
      to = copy(b_, to);
      *to++ = words_.sep;
    }
    const std::int64_t length = to - out.tokens;
    std::fill(out.types + begin_b, out.types + length, std::int64_t{1});
    for (std::int64_t i = 0; i < length; ++i) {
      range_.lowest = std::min(range_.lowest, out.tokens[i]);
      range_.highest = std::max(range_.highest, out.tokens[i]);
    }
    return length;
  }

  std::int64_t* copy(const Segment& segment, std::int64_t* to) const {
    constexpr std::int64_t width = sizeof(Token);
    std::int64_t at = 0;  // of the sentence's first token in the segment
    for (std::int64_t sentence = segment.first; sentence < segment.last && at < segment.end; ++sentence) {
      const std::int64_t size = store_.lengths[sentence];
      const std::int64_t from = std::max(segment.begin, at), until = std::min(segment.end, at + size);
      if (from < until) {
        const std::int64_t byte = store_.offsets[sentence] + (from - at) * width;
        if (byte < 0 || byte + (until - from) * width > store_.token_bytes) {
          throw std::out_of_range("a sentence lies outside the tokens");
        }
        widen<Token>(store_.tokens + byte, until - from, to);
        to += until - from;
      }
      at += size;
    }
    return to;
  }

  // Words are runs of places without the special tokens: word w has places_[starts_[w]] .. places_[starts_[w + 1] - 1].
  void find_words(std::int64_t length, const std::int64_t* tokens) {
    places_.clear();
    starts_.clear();
    for (std::int64_t place = 0; place < length; ++place) {
      const std::int64_t token = tokens[place];
      if (token == words_.cls || token == words_.sep) {
        continue;
      }
      const bool continues = token >= 0 && token < words_.size && words_.continues[token];
      if (starts_.empty() || !continues) {
        starts_.push_back(places_.size());
      }
      places_.push_back(place);
    }
  }

  void mask(std::int64_t length, std::int64_t target, NumpyRandom& random, const SampleRow& out) {
    find_words(length, out.tokens);
    const std::size_t count = starts_.size();
    starts_.push_back(places_.size());
    const double share = std::nearbyint(static_cast<double>(length) * recipe_.mask_prob);  // half to even
    const double budget = std::min(recipe_.mask_prob * static_cast<double>(target), std::max(1.0, share));
    order_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      order_[i] = i;
    }
    for (std::size_t i = count; i-- > 1;) {
      std::swap(order_[i], order_[random.below(static_cast<std::uint32_t>(i + 1))]);
    }
    std::int64_t masked = 0;
    for (const std::size_t start : order_) {
      if (static_cast<double>(masked + 1) > budget) {
        break;
      }
      const double chance = random.real();
      std::size_t run = 1;
      run += chance >= recipe_.run_chances[0] ? 1 : 0;
      run += chance >= recipe_.run_chances[1] ? 1 : 0;
      masked += mask_run(start, run, budget - static_cast<double>(masked), random, out);
    }
  }

  // Masks up to `run` words from word `start`, as many as there is room for; returns the number of tokens.
  std::int64_t mask_run(std::size_t start, std::size_t run, double room, NumpyRandom& random, const SampleRow& out) {
    const std::size_t from = starts_[start];
    for (; run > 0; --run) {
      const std::size_t until = starts_[std::min(start + run, starts_.size() - 1)];
      if (static_cast<double>(until - from) > room) {
        continue;
      }
      for (std::size_t i = from; i < until; ++i) {
        if (out.loss_mask[places_[i]] != 0.0F) {
          return 0;
        }
      }
      for (std::size_t i = from; i < until; ++i) {
        const std::int64_t place = places_[i];
        out.labels[place] = out.tokens[place];
        out.loss_mask[place] = 1.0F;
        if (random.real() < 0.8) {
          out.tokens[place] = words_.mask;
        } else if (random.real() >= 0.5) {
          out.tokens[place] = words_.replacements[random.below(static_cast<std::uint32_t>(words_.replacement_count))];
        }
      }
      return static_cast<std::int64_t>(until - from);
    }
    return 0;
  }

  const SentenceStore& store_;
  const Vocabulary& words_;
  const Recipe& recipe_;
  Segment a_{0, 0, 0, 0};
  Segment b_{0, 0, 0, 0};
  IdRange range_;
  std::vector<std::int64_t> places_;
  std::vector<std::size_t> starts_;
  std::vector<std::size_t> order_;
};

}  // namespace megazero::data
