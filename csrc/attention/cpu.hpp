// Attention on the CPU: products, softmax, mask and dropout in blocks that stay in the caches, in fp32 arithmetic.
#pragma once

#include <cstdint>

#include "common/head_tensor.hpp"
#include "common/keep.hpp"
#include "common/targets.hpp"

namespace megazero {

// Queries [queries, samples, heads, size] attend to keys and values [keys, samples, groups, size], of bf16 if narrow,
// else fp32; the result, or the gradients, are of bf16 if `narrow_results`, else fp32. Query i sees keys up to
// i + keys - queries if causal. `most` is the most that is used of the processor.
struct AttentionShape {
  std::int64_t queries, keys, samples, heads, groups, size;
  std::int64_t threads;
  float scale;
  bool causal, narrow, narrow_results;
  InstructionSet most;
};

// What may not be attended to, and what is dropped.
//
// mask: bool, the byte of (sample, head, query, key) is at the sum of its distances, keys being adjacent; 0 for none.
// keep: the rows' shares are [samples, heads, queries], those of the keys `column_sample` apart for each sample;
// nothing is dropped if they are 0.
struct AttentionLimits {
  const std::uint8_t* mask;
  std::int64_t mask_sample, mask_head, mask_query;
  Keep keep;
  std::int64_t column_sample;
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
