// The GPT sample index: where in the concatenated documents each training sample begins.
//
// Twin of `sample_index_reference` in megazero/data/index_build.py.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "data/unaligned.hpp"

namespace megazero::data {

// Writes samples + 1 rows (position in `documents`, offset in that sequence) to `rows`.
//
// Sample k covers tokens [k * sequence_length, (k + 1) * sequence_length + extra) of the sequences
// lengths[documents[0]], lengths[documents[1]], ... laid end to end. Row k > 0 names the sequence that holds
// the last token of sample k - 1, so that empty sequences are never named. Throws std::out_of_range if a
// document number is not a sequence or the tokens run out.
template <typename Row, typename Document>
void build_sample_index(const Unaligned<std::int32_t>& lengths, const Unaligned<Document>& documents,
                        std::int64_t sequence_length, std::int64_t extra, std::int64_t samples, Row* rows) {
  rows[0] = 0;
  rows[1] = 0;
  std::int64_t position = -1;  // of the sequence that ends at token `end`
  std::int64_t begin = 0;      // first token of that sequence in the stream
  std::int64_t end = 0;
  for (std::int64_t sample = 1; sample <= samples; ++sample) {
    const std::int64_t needed = sample * sequence_length + extra;
    while (end < needed) {
      if (++position >= documents.size()) {
        throw std::out_of_range("the documents hold fewer tokens than the samples need");
      }
      const std::int64_t document = documents[position];
      if (document < 0 || document >= lengths.size()) {
        throw std::out_of_range("the document index names a sequence that does not exist");
      }
      begin = end;
      end += lengths[document];
    }
    rows[2 * sample] = static_cast<Row>(position);
    rows[2 * sample + 1] = static_cast<Row>(needed - extra - begin);
  }
}

}  // namespace megazero::data
