// Python module megazero.ops._native: the CPU kernels of csrc, called with addresses.
//
// The bindings are thin: an address is `tensor.data_ptr()`, or 0 for an optional array that is absent. The callers
// (the files of megazero/ops) ensure types, lengths and contiguity; only sizes are checked here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "attention/cpu.hpp"
#include "bias_dropout_add/cpu.hpp"
#include "bias_gelu/cpu.hpp"
#include "chosen_rows/cpu.hpp"
#include "coded_linear/cpu.hpp"
#include "common/parallel.hpp"
#include "common/update.hpp"
#include "cross_entropy/cpu.hpp"
#include "gathered_sum/cpu.hpp"
#include "lamb/cpu.hpp"
#include "layer_norm/cpu.hpp"
#include "linear/cpu.hpp"
#include "paged_attention/cpu.hpp"
#include "permute/cpu.hpp"
#include "quantize/cpu.hpp"
#include "rms_norm/cpu.hpp"
#include "rotary/cpu.hpp"
#include "sort_by_expert/cpu.hpp"
#include "swiglu/cpu.hpp"
#include "update/cpu.hpp"

namespace py = pybind11;
using megazero::AttentionLimits;
using megazero::AttentionShape;
using megazero::CodedPath;
using megazero::ElementKind;
using megazero::HeadTensor;
using megazero::InstructionSet;
using megazero::Keep;
using megazero::Rows;
using megazero::UpdatePass;

namespace {

Rows make_rows(std::int64_t count, std::int64_t width, std::int64_t threads, bool narrow) {
  if (count < 0 || width < 0 || threads < 1) {
    throw std::invalid_argument("count and width must not be negative, threads must be positive");
  }
  return {count, width, threads, narrow};
}

UpdatePass make_update_pass(std::int64_t count, std::int64_t threads, std::uintptr_t grads, std::int64_t grad_kind,
                            double grad_scale, std::uintptr_t weights, std::int64_t weight_kind) {
  const auto last = static_cast<std::int64_t>(ElementKind::fp16);
  if (count < 0 || threads < 1 || std::min(grad_kind, weight_kind) < 0 || std::max(grad_kind, weight_kind) > last) {
    throw std::invalid_argument("count must not be negative, threads must be positive, kinds must be from 0 to 3");
  }
  return {count,
          threads,
          reinterpret_cast<const void*>(grads),
          static_cast<ElementKind>(grad_kind),
          static_cast<float>(grad_scale),
          reinterpret_cast<void*>(weights),
          static_cast<ElementKind>(weight_kind)};
}

AttentionShape make_attention_shape(std::int64_t queries, std::int64_t keys, std::int64_t samples, std::int64_t heads,
                                    std::int64_t groups, std::int64_t size, std::int64_t threads, float scale,
                                    bool narrow, bool narrow_results, InstructionSet most) {
  if (std::min({queries, keys, samples, heads, size}) < 0 || groups < 1 || heads % groups != 0 || threads < 1) {
    throw std::invalid_argument("sizes must not be negative, groups must divide heads, threads must be positive");
  }
  return {queries, keys, samples, heads, groups, size, threads, scale, narrow, narrow_results, most};
}

HeadTensor make_head_tensor(std::uintptr_t at, std::int64_t row, std::int64_t sample, std::int64_t head) {
  return {reinterpret_cast<void*>(at), row, sample, head};
}

Keep make_keep(std::uintptr_t low, std::uintptr_t odd_high, std::uintptr_t columns, std::int32_t threshold,
               float kept) {
  const auto share = [](std::uintptr_t at) { return reinterpret_cast<const std::int32_t*>(at); };
  return {share(low), share(odd_high), share(columns), threshold, kept};
}

void set_places(AttentionLimits& limits, std::int64_t query, std::int64_t key, std::int64_t left, std::int64_t right,
                std::int64_t prefix) {
  limits.query_place = query;
  limits.key_place = key;
  limits.shift = query - key;
  limits.left = left < 0 ? megazero::kNoLimit : left;
  limits.right = right < 0 ? megazero::kNoLimit : right;
  limits.prefix = prefix - key;
}

void set_sinks(AttentionLimits& limits, std::uintptr_t at, std::int64_t sample) {
  limits.sinks = reinterpret_cast<const std::uint8_t*>(at);
  limits.sinks_sample = sample;
}

void set_documents(AttentionLimits& limits, std::uintptr_t queries, std::uintptr_t keys) {
  limits.query_ids = reinterpret_cast<const std::int64_t*>(queries);
  limits.key_ids = reinterpret_cast<const std::int64_t*>(keys);
}

void set_blocks(AttentionLimits& limits, std::uintptr_t at, std::int64_t head, std::int64_t row, std::int64_t size) {
  if (size < 1) throw std::invalid_argument("the size of blocks must be positive");
  limits.blocks = reinterpret_cast<const std::uint8_t*>(at);
  limits.blocks_head = head;
  limits.blocks_row = row;
  limits.block = size;
}

void set_slopes(AttentionLimits& limits, std::uintptr_t at) { limits.slopes = reinterpret_cast<const float*>(at); }

void set_mask(AttentionLimits& limits, std::uintptr_t at, std::int64_t sample, std::int64_t head, std::int64_t query) {
  limits.mask = reinterpret_cast<const std::uint8_t*>(at);
  limits.mask_sample = sample;
  limits.mask_head = head;
  limits.mask_query = query;
}

void set_dropout(AttentionLimits& limits, Keep keep, std::int64_t column_sample) {
  limits.keep = keep;
  limits.column_sample = column_sample;
}

void update(const std::string& rule, UpdatePass pass, std::uintptr_t p, const std::vector<std::uintptr_t>& addresses,
            const std::vector<double>& coefficients) {
  std::vector<float*> states;
  for (const std::uintptr_t address : addresses) states.push_back(reinterpret_cast<float*>(address));
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  if (!megazero_update(rule.c_str(), pass, reinterpret_cast<float*>(p), count(states), states.data(),
                       count(coefficients), coefficients.data())) {
    throw std::invalid_argument("no rule has this name, as many states and as many coefficients");
  }
}

// How an argument arrives from Python: a pointer as a number, anything else unchanged.
template <typename T>
using FromPython = std::conditional_t<std::is_pointer_v<T>, std::uintptr_t, T>;

template <typename T>
T to_kernel(FromPython<T> value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(value);
  } else {
    return value;
  }
}

// Binds a kernel; other Python threads run while the kernel does.
template <typename... Arguments>
void bind(py::module_& module, const char* name, void (*kernel)(Arguments...)) {
  module.def(name, [kernel](FromPython<Arguments>... arguments) {
    py::gil_scoped_release release;
    kernel(to_kernel<Arguments>(arguments)...);
  });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "CPU kernels of megazero.ops; see the headers csrc/*/cpu.hpp for their arguments.";
  py::class_<Rows>(module, "Rows")
      .def(py::init(&make_rows), py::arg("count"), py::arg("width"), py::arg("threads"), py::arg("narrow"));
  py::class_<UpdatePass>(module, "UpdatePass")
      .def(py::init(&make_update_pass), py::arg("count"), py::arg("threads"), py::arg("grads"), py::arg("grad_kind"),
           py::arg("grad_scale"), py::arg("weights"), py::arg("weight_kind"));
  py::class_<Keep>(module, "Keep")
      .def(py::init(&make_keep), py::arg("low"), py::arg("odd_high"), py::arg("columns"), py::arg("threshold"),
           py::arg("kept"));
  py::enum_<InstructionSet>(module, "InstructionSet")
      .value("BASELINE", InstructionSet::baseline)
      .value("AVX2", InstructionSet::avx2)
      .value("AVX512", InstructionSet::avx512);
  py::enum_<CodedPath>(module, "CodedPath")
      .value("BASELINE", CodedPath::baseline)
      .value("AVX2", CodedPath::avx2)
      .value("AVX512", CodedPath::avx512)
      .value("AVX512_VNNI", CodedPath::avx512_vnni);
  py::class_<AttentionShape>(module, "AttentionShape")
      .def(py::init(&make_attention_shape), py::arg("queries"), py::arg("keys"), py::arg("samples"), py::arg("heads"),
           py::arg("groups"), py::arg("size"), py::arg("threads"), py::arg("scale"), py::arg("narrow"),
           py::arg("narrow_results"), py::arg("most") = InstructionSet::avx512);
  py::class_<HeadTensor>(module, "HeadTensor")
      .def(py::init(&make_head_tensor), py::arg("at"), py::arg("row"), py::arg("sample"), py::arg("head"));
  py::class_<AttentionLimits>(module, "AttentionLimits")
      .def(py::init<>())
      .def("places", &set_places, py::arg("query"), py::arg("key"), py::arg("left"), py::arg("right"),
           py::arg("prefix"))
      .def("sinks", &set_sinks, py::arg("at"), py::arg("sample"))
      .def("documents", &set_documents, py::arg("queries"), py::arg("keys"))
      .def("blocks", &set_blocks, py::arg("at"), py::arg("head"), py::arg("row"), py::arg("size"))
      .def("slopes", &set_slopes, py::arg("at"))
      .def("mask", &set_mask, py::arg("at"), py::arg("sample"), py::arg("head"), py::arg("query"))
      .def("dropout", &set_dropout, py::arg("keep"), py::arg("column_sample"));
  bind(module, "attention_forward", megazero_attention_forward);
  bind(module, "attention_backward", megazero_attention_backward);
  bind(module, "bias_dropout_add_forward", megazero_bias_dropout_add_forward);
  bind(module, "bias_dropout_add_backward", megazero_bias_dropout_add_backward);
  bind(module, "bias_gelu_forward", megazero_bias_gelu_forward);
  bind(module, "bias_gelu_backward", megazero_bias_gelu_backward);
  bind(module, "chosen_rows", megazero_chosen_rows);
  bind(module, "coded_linear", megazero_coded_linear);
  module.def("coded_path", &megazero::coded_path);
  bind(module, "cross_entropy_statistics", megazero_cross_entropy_statistics);
  bind(module, "cross_entropy_gradient", megazero_cross_entropy_gradient);
  bind(module, "gathered_sum_forward", megazero_gathered_sum_forward);
  bind(module, "gathered_sum_backward", megazero_gathered_sum_backward);
  bind(module, "integer_linear", megazero_integer_linear);
  bind(module, "lamb_norms", megazero_lamb_norms);
  bind(module, "lamb_move", megazero_lamb_move);
  bind(module, "layer_norm_forward", megazero_layer_norm_forward);
  bind(module, "layer_norm_backward", megazero_layer_norm_backward);
  bind(module, "ordered_linear", megazero_ordered_linear);
  bind(module, "pack_weight", megazero_pack_weight);
  bind(module, "paged_attention", megazero_paged_attention);
  bind(module, "permute", megazero_permute);
  bind(module, "quantize_rows", megazero_quantize_rows);
  bind(module, "dequantize_rows", megazero_dequantize_rows);
  bind(module, "rms_norm_forward", megazero_rms_norm_forward);
  bind(module, "rms_norm_backward", megazero_rms_norm_backward);
  bind(module, "rotary", megazero_rotary);
  bind(module, "sort_by_expert", megazero_sort_by_expert);
  bind(module, "swiglu_forward", megazero_swiglu_forward);
  bind(module, "swiglu_backward", megazero_swiglu_backward);
  module.def("update", &update, py::call_guard<py::gil_scoped_release>());
}
