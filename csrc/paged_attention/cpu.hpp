// Attention of many sequences over keys and values that lie in pages (PagedAttention, Kwon et al. 2023).
#pragma once

#include <cstdint>

#include "attention/cpu.hpp"

extern "C" {
// The last rows of `shape.samples` sequences, behind each other, attend to all rows of theirs up to their own: the bits
// are those of megazero_attention_forward over each whole sequence, however it is divided into steps.
//
// q, out: [rows, heads, size]. steps: int64 [samples, 2 + pages]: the number of a sequence's rows, how many positions
// were before them, and its pages. keys [pages, groups, page / 16, size, 16] and values [pages, groups, page, size up to
// a multiple of 16] are fp32; `shape.keys` is the size of a page. `sinks` positions are visible outside of the window.
// Of `limits`, left and slopes count.
void megazero_paged_attention(megazero::AttentionShape shape, megazero::AttentionLimits limits, std::int64_t sinks,
                              std::int64_t pages, const std::int64_t* steps, const float* keys, const float* values,
                              megazero::HeadTensor q, megazero::HeadTensor out);
}
