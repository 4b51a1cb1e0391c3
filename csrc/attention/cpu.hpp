// Attention on the CPU: whole (fp32 arithmetic in blocks that stay in the caches), and the elementwise pass of the
// blocked backward whose matrix products are torch's (megazero/ops/attention/flash_cpu.py).
#pragma once

#include "common/parallel.hpp"

namespace megazero {

// Queries [queries, samples, heads, size] attend to keys and values [keys, samples, groups, size], of bf16 if narrow,
// else fp32. Query i sees keys up to i + keys - queries if causal.
struct AttentionShape {
  std::int64_t queries, keys, samples, heads, groups, size;
  std::int64_t threads;
  float scale;
  bool causal, narrow;
};

// [rows, samples, heads, size] somewhere in memory, with the distances of neighbors; those of `size` are adjacent.
struct AttentionTensor {
  void* at;
  std::int64_t row, sample, head;
};

// What may not be attended to, and what is dropped.
//
// mask: bool, the byte of (sample, head, query, key) is at the sum of its distances, keys being adjacent; 0 for none.
// Dropout with the masks of counter_random (keep.py): low, high: int32 [samples, heads, queries], the rows' hashes;
// columns: int32, those of the keys, `column_sample` apart for each sample; low is 0 if nothing is dropped. A
// probability is kept if its hash is not below `threshold`, and is then multiplied by `kept`.
struct AttentionLimits {
  const std::uint8_t* mask;
  std::int64_t mask_sample, mask_head, mask_query;
  const std::int32_t *low, *high, *columns;
  std::int64_t column_sample;
  std::int32_t threshold;
  float kept;
};

}  // namespace megazero

extern "C" {
// out [queries, samples, heads, size] and lse [samples, heads, queries], the log-sum-exp of each query's scaled scores;
// zeros and -inf for a query that may attend to nothing.
void megazero_attention_forward(megazero::AttentionShape shape, megazero::AttentionLimits limits,
                                megazero::AttentionTensor q, megazero::AttentionTensor k, megazero::AttentionTensor v,
                                megazero::AttentionTensor out, float* lse);

// The gradients of q, k and v from those of out and of lse (grad_lse is 0 if that has none). Each group of heads is
// computed by one thread, so the number of threads changes no bit.
void megazero_attention_backward(megazero::AttentionShape shape, megazero::AttentionLimits limits,
                                 megazero::AttentionTensor q, megazero::AttentionTensor k, megazero::AttentionTensor v,
                                 megazero::AttentionTensor out, const float* lse, megazero::AttentionTensor grad,
                                 const float* grad_lse, megazero::AttentionTensor grad_q,
                                 megazero::AttentionTensor grad_k, megazero::AttentionTensor grad_v);

// Replaces scores [heads * queries, keys] in place with exp(factor * score), and with 0 where a key comes after its
// query, that is in columns beyond (row % queries) + diagonal.
void megazero_attention_probabilities(megazero::Rows rows, std::int64_t queries, std::int64_t diagonal, float factor,
                                      void* scores);
}
