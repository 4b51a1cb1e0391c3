// Bindings of the BERT dataset's sample map and samples; the numpy twins are in megazero/data/bert/.

#include "data/bert.hpp"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "data/masked_sample.hpp"
#include "data/sentence_map.hpp"

namespace py = pybind11;

namespace megazero::data {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Unaligned<T> view(const Array<T>& array) {
  return Unaligned<T>(static_cast<const py::array&>(array).data(), array.size());
}

// The rows as an array [n, 3] that owns the vector.
template <typename Row>
py::array adopt(std::vector<Row>&& rows) {
  auto kept = std::make_unique<std::vector<Row>>(std::move(rows));
  const auto count = static_cast<py::ssize_t>(kept->size() / 3);
  Row* data = kept->data();
  const py::capsule owner(kept.release(), [](void* held) { delete static_cast<std::vector<Row>*>(held); });
  return py::array_t<Row>({count, py::ssize_t{3}}, data, owner);
}

template <typename Row>
py::array sentence_map_as(const Unaligned<std::int32_t>& lengths, const Unaligned<std::int64_t>& boundaries,
                          const MapPlan& plan) {
  std::vector<Row> rows;
  {
    py::gil_scoped_release release;
    rows = build_sentence_map<Row>(lengths, boundaries, plan);
  }
  return adopt(std::move(rows));
}

py::array sentence_map(const Array<std::int32_t>& lengths, const Array<std::int64_t>& boundaries,
                       std::int64_t num_samples, std::int64_t epochs, std::int64_t target, std::int64_t min_sentences,
                       std::int64_t short_ratio, std::uint64_t seed, std::int64_t longest_sentence) {
  if (boundaries.size() < 1 || epochs < 1 || target < 2 || min_sentences < 1 || short_ratio < 0) {
    throw std::invalid_argument("there must be a boundary, an epoch, a target of 2 and a sentence in a sample");
  }
  const MapPlan plan{num_samples, epochs, target, min_sentences, short_ratio, seed, longest_sentence};
  if (lengths.size() > static_cast<py::ssize_t>(std::numeric_limits<std::uint32_t>::max())) {
    return sentence_map_as<std::uint64_t>(view(lengths), view(boundaries), plan);
  }
  return sentence_map_as<std::uint32_t>(view(lengths), view(boundaries), plan);
}

// The arrays of a batch, [b, length] and [b], filled with what unused positions hold.
class Batch {
 public:
  Batch(py::ssize_t size, py::ssize_t length, std::int64_t pad)
      : length_(length), tokens_({size, length}), types_({size, length}), labels_({size, length}),
        loss_mask_({size, length}), lengths_(size), swapped_(size), truncated_(size) {
    std::fill_n(tokens_.mutable_data(), tokens_.size(), pad);
    std::fill_n(types_.mutable_data(), types_.size(), std::int64_t{0});
    std::fill_n(labels_.mutable_data(), labels_.size(), std::int64_t{-1});
    std::fill_n(loss_mask_.mutable_data(), loss_mask_.size(), 0.0F);
    first_ = SampleRow{tokens_.mutable_data(),    types_.mutable_data(),   labels_.mutable_data(),
                       loss_mask_.mutable_data(), lengths_.mutable_data(), swapped_.mutable_data(),
                       truncated_.mutable_data()};
  }

  SampleRow row(std::int64_t k) const {
    const std::int64_t at = k * length_;
    return SampleRow{first_.tokens + at, first_.types + at,  first_.labels + at,  first_.loss_mask + at,
                     first_.length + k,  first_.swapped + k, first_.truncated + k};
  }

  py::tuple arrays(const IdRange& range) const {
    return py::make_tuple(tokens_, types_, labels_, loss_mask_, lengths_, swapped_, truncated_, range.lowest,
                          range.highest);
  }

 private:
  std::int64_t length_;
  Array<std::int64_t> tokens_, types_, labels_;
  Array<float> loss_mask_;
  Array<std::int64_t> lengths_, swapped_, truncated_;
  SampleRow first_{};
};

struct Wanted {
  const std::int64_t* rows;
  const std::int64_t* seeds;
  std::int64_t size;
};

template <typename Token>
IdRange make_all(const SentenceStore& store, const Vocabulary& words, const Recipe& recipe, const Wanted& wanted,
                 const Batch& batch) {
  SampleMaker<Token> maker(store, words, recipe);
  for (std::int64_t k = 0; k < wanted.size; ++k) {
    maker.make(wanted.rows + 3 * k, static_cast<std::uint32_t>(wanted.seeds[k]), batch.row(k));
  }
  return maker.range();
}

IdRange make_any(char kind, std::int64_t width, const SentenceStore& store, const Vocabulary& words,
                 const Recipe& recipe, const Wanted& wanted, const Batch& batch) {
  if (kind == 'u' && width == 1) return make_all<std::uint8_t>(store, words, recipe, wanted, batch);
  if (kind == 'i' && width == 1) return make_all<std::int8_t>(store, words, recipe, wanted, batch);
  if (kind == 'u' && width == 2) return make_all<std::uint16_t>(store, words, recipe, wanted, batch);
  if (kind == 'i' && width == 2) return make_all<std::int16_t>(store, words, recipe, wanted, batch);
  if (kind == 'i' && width == 4) return make_all<std::int32_t>(store, words, recipe, wanted, batch);
  if (kind == 'i' && width == 8) return make_all<std::int64_t>(store, words, recipe, wanted, batch);
  throw std::invalid_argument("tokens must be uint8, int8, uint16, int16, int32 or int64");
}

// store: (tokens, lengths, offsets); words: ([CLS] [SEP] [MASK] [PAD], continues, replacements). Returns tokens,
// types, labels, loss mask, lengths, exchanged, truncated, lowest and highest id.
py::tuple masked_samples(const std::tuple<py::array, Array<std::int32_t>, Array<std::int64_t>>& store,
                         const Array<std::int64_t>& rows, const Array<std::int64_t>& seeds,
                         const std::tuple<Array<std::int64_t>, Array<bool>, Array<std::int64_t>>& words,
                         std::int64_t length, double mask_prob, const Array<double>& run_chances, bool two_segments) {
  const auto& [tokens, lengths, offsets] = store;
  const auto& [specials, continues, replacements] = words;
  if (rows.ndim() != 2 || rows.shape(1) != 3 || seeds.size() != rows.shape(0) || length < 3 || specials.size() != 4 ||
      replacements.size() < 1 || run_chances.size() != 3 || offsets.size() != lengths.size() ||
      !(tokens.flags() & py::array::c_style)) {
    throw std::invalid_argument("rows must be [b, 3] with a seed each, and the vocabulary and chances complete");
  }
  const SentenceStore sentences{static_cast<const char*>(tokens.data()), tokens.nbytes(), view(lengths),
                                view(offsets)};
  const std::int64_t* ids = specials.data();
  const Vocabulary vocabulary{ids[0],           ids[1],           ids[2],
                              ids[3],           continues.data(), continues.size(),
                              replacements.data(), replacements.size()};
  const Recipe recipe{length, mask_prob, run_chances.data(), two_segments};
  const Wanted wanted{rows.data(), seeds.data(), rows.shape(0)};
  const Batch batch(rows.shape(0), length, vocabulary.pad);
  const char kind = tokens.dtype().kind();
  const std::int64_t width = tokens.itemsize();
  IdRange range;
  {
    py::gil_scoped_release release;
    range = make_any(kind, width, sentences, vocabulary, recipe, wanted, batch);
  }
  return batch.arrays(range);
}

}  // namespace

void bind_bert(py::module_& module) {
  module.def("sentence_map", &sentence_map, py::arg("lengths").noconvert(), py::arg("boundaries"),
             py::arg("num_samples"), py::arg("epochs"), py::arg("target"), py::arg("min_sentences"),
             py::arg("short_ratio"), py::arg("seed"), py::arg("longest_sentence"));
  module.def("masked_samples", &masked_samples, py::arg("store").noconvert(), py::arg("rows"), py::arg("seeds"),
             py::arg("words").noconvert(), py::arg("length"), py::arg("mask_prob"), py::arg("run_chances"),
             py::arg("two_segments"));
}

}  // namespace megazero::data
