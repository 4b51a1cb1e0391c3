// Python module megazero.data._native: index building and sample gathering.
//
// The bindings are thin: they check shapes and types, the algorithms are in the headers, and every function has a
// numpy twin in megazero/data/index_build.py that gives the same arrays.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "data/bert.hpp"
#include "data/blending.hpp"
#include "data/gather.hpp"
#include "data/json_columns.hpp"
#include "data/permutation.hpp"
#include "data/sample_index.hpp"

namespace py = pybind11;
using megazero::data::IdRange;
using megazero::data::SampleBatch;
using megazero::data::SampleSource;
using megazero::data::Unaligned;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Unaligned<T> view(const Array<T>& array) {
  return Unaligned<T>(static_cast<const py::array&>(array).data(), array.size());
}

// walk: (tokens, position, row) before the block. Returns (rows [n, 2], the walk after it).
template <typename Document>
py::tuple sample_rows(const Array<std::int32_t>& lengths, const Array<Document>& documents,
                      std::int64_t sequence_length, std::int64_t extra, std::int64_t samples,
                      std::tuple<std::int64_t, std::int64_t, std::int64_t> walk) {
  if (sequence_length < 1 || samples < 0 || extra < 0) {
    throw std::invalid_argument("sequence_length must be positive, extra and samples not negative");
  }
  const auto lengths_view = view(lengths);
  const auto documents_view = view(documents);
  megazero::data::SampleWalk at{std::get<0>(walk), std::get<1>(walk), std::get<2>(walk)};
  std::vector<std::int64_t> rows;
  {
    py::gil_scoped_release release;
    megazero::data::walk_samples<Document>(lengths_view, documents_view, sequence_length, extra, samples, at, rows);
  }
  Array<std::int64_t> out({static_cast<py::ssize_t>(rows.size() / 2), py::ssize_t{2}});
  std::copy(rows.begin(), rows.end(), out.mutable_data());
  return py::make_tuple(std::move(out), py::make_tuple(at.tokens, at.position, at.row));
}

py::tuple blending_index(const Array<double>& weights, const py::object& limits, std::int64_t size) {
  const std::int64_t datasets = weights.size();
  if (datasets < 1 || datasets > std::numeric_limits<std::int16_t>::max() || size < 0) {
    throw std::invalid_argument("there must be 1..32767 datasets and a size that is not negative");
  }
  Array<std::int64_t> limit_array;
  const std::int64_t* limit_data = nullptr;
  if (!limits.is_none()) {
    limit_array = limits.cast<Array<std::int64_t>>();
    limit_data = limit_array.data();
    std::int64_t total = 0;
    for (py::ssize_t d = 0; d < limit_array.size(); ++d) {
      total += limit_data[d];
    }
    if (limit_array.size() != datasets || total < size) {
      throw std::invalid_argument("the limits must be one per dataset and add up to the size");
    }
  }
  Array<std::int16_t> dataset_index(size);
  Array<std::int64_t> sample_index(size);
  std::int16_t* dataset_out = dataset_index.mutable_data();
  std::int64_t* sample_out = sample_index.mutable_data();
  const double* weight_data = weights.data();
  {
    py::gil_scoped_release release;
    megazero::data::build_blending_index(weight_data, limit_data, datasets, size, dataset_out, sample_out);
  }
  return py::make_tuple(dataset_index, sample_index);
}

template <typename Token, typename Document>
IdRange gather_all(const SampleSource<Document>& source, const SampleBatch& batch) {
  IdRange range;
  for (std::int64_t row = 0; row < batch.batch; ++row) {
    megazero::data::gather_sample<Token, Document>(source, batch, row, range);
  }
  return range;
}

template <typename Document>
IdRange gather_any(char kind, std::int64_t width, const SampleSource<Document>& source, const SampleBatch& batch) {
  if (kind == 'u' && width == 1) return gather_all<std::uint8_t>(source, batch);
  if (kind == 'i' && width == 1) return gather_all<std::int8_t>(source, batch);
  if (kind == 'u' && width == 2) return gather_all<std::uint16_t>(source, batch);
  if (kind == 'i' && width == 2) return gather_all<std::int16_t>(source, batch);
  if (kind == 'i' && width == 4) return gather_all<std::int32_t>(source, batch);
  if (kind == 'i' && width == 8) return gather_all<std::int64_t>(source, batch);
  throw std::invalid_argument("tokens must be uint8, int8, uint16, int16, int32 or int64");
}

// source: (tokens, lengths, offsets, documents). Returns (tokens, labels, lowest id, highest id).
template <typename Document>
py::tuple gather(const py::array& tokens, const Array<std::int32_t>& lengths, const Array<std::int64_t>& offsets,
                 const Array<Document>& documents, const Array<std::int64_t>& starts, std::int64_t length,
                 std::int64_t extra) {
  if (starts.ndim() != 2 || starts.shape(1) != 2 || length < 1 || extra < 0 || extra > 1 ||
      offsets.size() != lengths.size() || !(tokens.flags() & py::array::c_style)) {
    throw std::invalid_argument("starts must be [b, 2], length positive, extra 0 or 1, the arrays contiguous");
  }
  const SampleSource<Document> source{static_cast<const char*>(tokens.data()), tokens.nbytes(), view(lengths),
                                      view(offsets), view(documents)};
  Array<std::int64_t> out_tokens({starts.shape(0), length});
  Array<std::int64_t> out_labels({starts.shape(0), length});
  const SampleBatch batch{starts.data(), starts.shape(0),           length,
                          extra,         out_tokens.mutable_data(), out_labels.mutable_data()};
  const char kind = tokens.dtype().kind();
  const std::int64_t width = tokens.itemsize();
  IdRange range;
  {
    py::gil_scoped_release release;
    range = gather_any<Document>(kind, width, source, batch);
  }
  return py::make_tuple(out_tokens, out_labels, range.lowest, range.highest);
}

py::array permuted(const Array<std::int64_t>& places, std::int64_t count,
                   const std::array<std::uint64_t, megazero::data::Permutation::kRounds>& keys) {
  Array<std::int64_t> out(places.size());
  const std::int64_t* from = places.data();
  std::int64_t* to = out.mutable_data();
  for (py::ssize_t i = 0; i < places.size(); ++i) {
    if (from[i] < 0 || from[i] >= count) {
      throw std::invalid_argument("the places must be in 0..count-1");
    }
  }
  const megazero::data::Permutation permutation(static_cast<std::uint64_t>(count), keys);
  {
    py::gil_scoped_release release;
    for (py::ssize_t i = 0; i < places.size(); ++i) {
      to[i] = static_cast<std::int64_t>(permutation[static_cast<std::uint64_t>(from[i])]);
    }
  }
  return std::move(out);
}

// Returns (name -> column, numbers of the lines that were not understood, number of lines).
py::tuple json_columns(const Array<std::uint8_t>& text, std::int64_t base) {
  megazero::data::JsonColumns lines;
  const std::string_view view(reinterpret_cast<const char*>(text.data()), static_cast<std::size_t>(text.size()));
  {
    py::gil_scoped_release release;
    lines.read(view, base);
  }
  py::dict columns;
  for (const auto& column : lines.columns()) {
    columns[py::str(column.name)] = py::array(static_cast<py::ssize_t>(column.values.size()), column.values.data());
  }
  return py::make_tuple(std::move(columns), lines.refused(), lines.lines());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Index building and sample gathering; see megazero/data/index_build.py for the reference twins.";
  // noconvert: a wrong type must raise an error instead of silently copying a large mapped array.
  const auto lengths = py::arg("lengths").noconvert();
  const auto documents = py::arg("documents").noconvert();
  module.def("sample_rows", &sample_rows<std::int32_t>, lengths, documents, py::arg("sequence_length"),
             py::arg("extra"), py::arg("samples"), py::arg("walk"));
  module.def("sample_rows", &sample_rows<std::int64_t>, lengths, documents, py::arg("sequence_length"),
             py::arg("extra"), py::arg("samples"), py::arg("walk"));
  module.def("permuted", &permuted, py::arg("places"), py::arg("count"), py::arg("keys"));
  module.def("blending_index", &blending_index, py::arg("weights"), py::arg("limits"), py::arg("size"));
  module.def("gather", &gather<std::int32_t>, py::arg("tokens"), lengths, py::arg("offsets").noconvert(), documents,
             py::arg("starts"), py::arg("length"), py::arg("extra"));
  module.def("gather", &gather<std::int64_t>, py::arg("tokens"), lengths, py::arg("offsets").noconvert(), documents,
             py::arg("starts"), py::arg("length"), py::arg("extra"));
  module.def("json_columns", &json_columns, py::arg("text").noconvert(), py::arg("base"));
  megazero::data::bind_bert(module);
}
