// Gathering a batch of GPT samples from the mapped tokens.
//
// Twin of `gather_reference` in megazero/data/index_build.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "data/unaligned.hpp"

namespace megazero::data {

struct IdRange {
  std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
  std::int64_t highest = std::numeric_limits<std::int64_t>::min();
};

// What the samples are cut from. tokens: the whole `.bin`; offsets: bytes; documents: sequence numbers.
template <typename Document>
struct SampleSource {
  const char* tokens;
  std::int64_t token_bytes;
  Unaligned<std::int32_t> lengths;
  Unaligned<std::int64_t> offsets;
  Unaligned<Document> documents;
};

// Which samples, and where they go. starts: [batch, 2] rows (position, offset); tokens, labels: [batch, length].
// A sample reads `length` + `extra` ids.
struct SampleBatch {
  const std::int64_t* starts;
  std::int64_t batch;
  std::int64_t length;
  std::int64_t extra;
  std::int64_t* tokens;
  std::int64_t* labels;
};

// Widens `count` ids to int64.
template <typename Token>
void widen(const char* from, std::int64_t count, std::int64_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    Token value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(Token)), sizeof(Token));
    to[i] = static_cast<std::int64_t>(value);
  }
}

template <typename Token>
void extend_range(const char* from, std::int64_t count, IdRange& range) {
  Token low = std::numeric_limits<Token>::max();
  Token high = std::numeric_limits<Token>::min();
  for (std::int64_t i = 0; i < count; ++i) {
    Token value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(Token)), sizeof(Token));
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (count > 0) {
    range.lowest = std::min(range.lowest, static_cast<std::int64_t>(low));
    range.highest = std::max(range.highest, static_cast<std::int64_t>(high));
  }
}

// Cuts out sample `row`: its tokens are the first `length` ids, its labels the ids one place later; with extra = 0 the
// last label stays 0. Throws std::out_of_range if the documents end first.
template <typename Token, typename Document>
void gather_sample(const SampleSource<Document>& source, const SampleBatch& batch, std::int64_t row,
                   IdRange& range) {
  constexpr std::int64_t width = sizeof(Token);
  const std::int64_t length = batch.length;
  std::int64_t position = batch.starts[2 * row];
  std::int64_t offset = batch.starts[2 * row + 1];
  std::int64_t* tokens = batch.tokens + row * length;
  std::int64_t* labels = batch.labels + row * length;
  labels[length - 1] = 0;
  std::int64_t done = 0;
  for (const std::int64_t wanted = length + batch.extra; done < wanted; ++position, offset = 0) {
    if (position < 0 || position >= source.documents.size()) {
      throw std::out_of_range("a sample runs past the end of the document index");
    }
    const std::int64_t document = source.documents[position];
    if (document < 0 || document >= source.lengths.size()) {
      throw std::out_of_range("the document index names a sequence that does not exist");
    }
    const std::int64_t count = std::min<std::int64_t>(source.lengths[document] - offset, wanted - done);
    const std::int64_t first_byte = source.offsets[document] + offset * width;
    if (offset < 0 || count < 0 || first_byte < 0 || first_byte + count * width > source.token_bytes) {
      throw std::out_of_range("a sample lies outside its sequence");
    }
    const char* from = source.tokens + first_byte;
    widen<Token>(from, std::min(count, length - done), tokens + done);
    const std::int64_t skip = done == 0 ? 1 : 0;  // the very first id of a sample is nobody's label
    if (count > skip) {
      widen<Token>(from + skip * width, count - skip, labels + done + skip - 1);
    }
    extend_range<Token>(from, count, range);
    done += count;
  }
}

}  // namespace megazero::data
