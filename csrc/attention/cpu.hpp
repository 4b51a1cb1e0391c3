// The elementwise pass of the blocked attention backward (megazero/ops/attention/flash_cpu.py).
#pragma once

#include "common/parallel.hpp"

extern "C" {
// Replaces scores [heads * queries, keys] in place with exp(factor * score), and with 0 where a key comes after its
// query, that is in columns beyond (row % queries) + diagonal.
void megazero_attention_probabilities(megazero::Rows rows, std::int64_t queries, std::int64_t diagonal, float factor,
                                      void* scores);
}
