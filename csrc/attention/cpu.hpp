// Attention on the CPU: products, softmax, mask and dropout in blocks that stay in the caches, in fp32 arithmetic.
#pragma once

#include <cstdint>

#include "common/head_tensor.hpp"
#include "common/keep.hpp"
#include "common/targets.hpp"

namespace megazero {

// Queries [queries, samples, heads, size] attend to keys and values [keys, samples, groups, size], of bf16 if narrow,
// else fp32; the result, or the gradients, are of bf16 if `narrow_results`, else fp32. `most` is the
// most that is used of the processor.
struct AttentionShape {
  std::int64_t queries, keys, samples, heads, groups, size;
  std::int64_t threads;
  float scale;
  bool narrow, narrow_results;
  InstructionSet most;
};

// The limit of a side that has none.
constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;

// What may be attended to, and what is dropped. All restrictions hold at once; a pointer is 0 where there is none.
//
// shift: the place of the first query, less that of the first key. left, right: the most keys before and after its own
// that a query sees. prefix: keys before this one are seen by all queries whose own keys are before it, whatever `right`
// is. sinks: bytes [keys], `sinks_sample` apart, of the keys that `left` does not hide.
//
// query_ids [samples, queries] and key_ids [samples, keys]: a query sees keys of its own document alone.
//
// blocks: bytes of the blocks of `block` places that may meet, of (head, row, column) at the sum of its distances,
// columns being adjacent; query_place and key_place are the places of the first query and key.
//
// slopes [heads]: a score gets its head's slope times the key's place, less the query's.
//
// mask: bool, the byte of (sample, head, query, key) is at the sum of its distances, keys being adjacent.
//
// keep: the rows' shares are [samples, heads, queries], those of the keys `column_sample` apart for each sample;
// nothing is dropped if they are 0.
struct AttentionLimits {
  std::int64_t shift = 0, left = kNoLimit, right = kNoLimit, prefix = 0;
  const std::uint8_t* sinks = nullptr;
  std::int64_t sinks_sample = 0;
  const std::int64_t *query_ids = nullptr, *key_ids = nullptr;
  const std::uint8_t* blocks = nullptr;
  std::int64_t blocks_head = 0, blocks_row = 0, block = 1, query_place = 0, key_place = 0;
  const float* slopes = nullptr;
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_sample = 0, mask_head = 0, mask_query = 0;
  Keep keep{};
  std::int64_t column_sample = 0;
};

}  // namespace megazero

extern "C" {
// out [queries, samples, heads, size] and lse [samples, heads, queries], the log-sum-exp of each query's scaled scores;
// zeros and -inf for a query that may attend to nothing.
void megazero_attention_forward(megazero::AttentionShape shape, megazero::AttentionLimits limits,
                                megazero::HeadTensor q, megazero::HeadTensor k, megazero::HeadTensor v,
                                megazero::HeadTensor out, float* lse);

// The gradients of q, k and v from those of out and of lse (grad_lse is 0 if that has none). Each group of heads is
// computed by one thread, so the number of threads changes no bit.
void megazero_attention_backward(megazero::AttentionShape shape, megazero::AttentionLimits limits,
                                 megazero::HeadTensor q, megazero::HeadTensor k, megazero::HeadTensor v,
                                 megazero::HeadTensor out, const float* lse, megazero::HeadTensor grad,
                                 const float* grad_lse, megazero::HeadTensor grad_q,
                                 megazero::HeadTensor grad_k, megazero::HeadTensor grad_v);
}
