// The bindings of the BERT dataset.
#pragma once

#include <pybind11/pybind11.h>

namespace megazero::data {

// Adds `sentence_map` and `masked_samples` to the module.
void bind_bert(pybind11::module_& module);

}  // namespace megazero::data
