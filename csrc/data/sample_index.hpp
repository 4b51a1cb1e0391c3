// The GPT sample index: where in the concatenated documents each training sample begins.
//
// Twin of `sample_rows_reference` in megazero/data/index_build.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "data/unaligned.hpp"

namespace megazero::data {

// A place in the walk over the documents: the tokens and the documents before it, and the number of the next row.
struct SampleWalk {
  std::int64_t tokens;
  std::int64_t position;
  std::int64_t row;
};

// Walks over a block of the documents and appends their rows (position among all documents, offset in that sequence),
// at most up to row `samples`.
//
// Sample k covers tokens [k * sequence_length, (k + 1) * sequence_length + extra) of the documents laid end to end. Row
// k > 0 names the sequence that holds the last token of sample k - 1, so that empty sequences are never named. Throws
// std::out_of_range if a document number is not a sequence.
template <typename Document>
void walk_samples(const Unaligned<std::int32_t>& lengths, const Unaligned<Document>& documents,
                  std::int64_t sequence_length, std::int64_t extra, std::int64_t samples, SampleWalk& walk,
                  std::vector<std::int64_t>& rows) {
  for (std::int64_t number = 0; number < documents.size() && walk.row <= samples; ++number, ++walk.position) {
    const std::int64_t document = documents[number];
    if (document < 0 || document >= lengths.size()) {
      throw std::out_of_range("the document index names a sequence that does not exist");
    }
    const std::int64_t begin = walk.tokens;
    walk.tokens += lengths[document];
    for (; walk.row <= samples && walk.row * sequence_length + extra <= walk.tokens; ++walk.row) {
      rows.push_back(walk.position);
      rows.push_back(walk.row * sequence_length - begin);
    }
  }
}

}  // namespace megazero::data
