#include "attention/cpu.hpp"

#include "attention/blocks.hpp"
#include "common/numbers.hpp"
#include "common/parallel.hpp"
#include "common/targets.hpp"
#include "common/thread_rows.hpp"

namespace megazero {
namespace {

struct ForwardCall {
  AttentionShape shape;
  AttentionLimits limits;
  HeadTensor q, k, v, out;
  float* lse;
};

struct BackwardCall {
  AttentionShape shape;
  AttentionLimits limits;
  HeadTensor q, k, v, out;
  const float* lse;
  HeadTensor grad;
  const float* grad_lse;
  HeadTensor grad_q, grad_k, grad_v;
};

template <typename T>
MEGAZERO_INLINE T* head_of(const HeadTensor& tensor, std::int64_t sample, std::int64_t head) {
  return static_cast<T*>(tensor.at) + sample * tensor.sample + head * tensor.head;
}

// The heads [begin, end) of all samples.
template <typename Set, typename T, typename Result>
MEGAZERO_INLINE void forward(const ForwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  const AttentionShape& shape = call.shape;
  const attention::Sizes sizes(shape);
  auto* notes = reinterpret_cast<attention::PanelNote*>(scratch);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t sample = i / shape.heads, head = i % shape.heads;
    const std::int64_t group = head / (shape.heads / shape.groups);
    const attention::Visible visible(shape, call.limits, sample, head, notes);
    visible.note_panels();
    attention::forward_head<Set>(sizes, visible, shape.scale, head_of<const T>(call.q, sample, head), call.q.row,
                                 head_of<const T>(call.k, sample, group), call.k.row,
                                 head_of<const T>(call.v, sample, group), call.v.row,
                                 head_of<Result>(call.out, sample, head), call.out.row, call.lse + i * shape.queries,
                                 scratch + sizes.notes());
  }
}

// The groups [begin, end) of all samples.
template <typename Set, typename T, typename Result>
MEGAZERO_INLINE void backward(const BackwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  const AttentionShape& shape = call.shape;
  const attention::Sizes sizes(shape);
  auto* notes = reinterpret_cast<attention::PanelNote*>(scratch);
  attention::Backward memory(sizes, scratch + sizes.notes());
  const std::int64_t each = shape.heads / shape.groups;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t sample = i / shape.groups, group = i % shape.groups;
    attention::copy_in(head_of<const T>(call.v, sample, group), call.v.row, sizes.keys, sizes, 1.0f, memory.keys,
                       sizes.all_keys);
    attention::transpose(memory.keys, sizes.all_keys, sizes.row, memory.values_turned);
    attention::copy_in(head_of<const T>(call.k, sample, group), call.k.row, sizes.keys, sizes, 1.0f, memory.keys,
                       sizes.all_keys);
    attention::transpose(memory.keys, sizes.all_keys, sizes.row, memory.keys_turned);
    std::fill(memory.grad_k, memory.grad_k + sizes.all_keys * sizes.row, 0.0f);
    std::fill(memory.grad_v, memory.grad_v + sizes.all_keys * sizes.row, 0.0f);
    for (std::int64_t head = group * each; head < (group + 1) * each; ++head) {
      const attention::Visible visible(shape, call.limits, sample, head, notes);
      if (head == group * each) visible.note_panels();
      const std::int64_t number = (sample * shape.heads + head) * shape.queries;
      attention::copy_in(head_of<const T>(call.q, sample, head), call.q.row, sizes.queries, sizes, shape.scale,
                         memory.queries, sizes.all_queries);
      attention::copy_in(head_of<const T>(call.grad, sample, head), call.grad.row, sizes.queries, sizes, 1.0f,
                         memory.grads, sizes.all_queries);
      attention::row_terms(head_of<const T>(call.out, sample, head), call.out.row, sizes, memory.grads,
                               call.grad_lse == nullptr ? nullptr : call.grad_lse + number, memory.delta);
      attention::backward_head<Set>(sizes, visible, call.lse + number, memory);
      attention::copy_out(memory.grad_q, sizes.queries, sizes, shape.scale, head_of<Result>(call.grad_q, sample, head),
                          call.grad_q.row);
    }
    attention::copy_out(memory.grad_k, sizes.keys, sizes, 1.0f, head_of<Result>(call.grad_k, sample, group),
                        call.grad_k.row);
    attention::copy_out(memory.grad_v, sizes.keys, sizes, 1.0f, head_of<Result>(call.grad_v, sample, group),
                        call.grad_v.row);
  }
}

template <typename T, typename Result>
void forward_baseline(const ForwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  forward<BaselineTile, T, Result>(call, begin, end, scratch);
}

template <typename T, typename Result>
MEGAZERO_AVX2 void forward_avx2(const ForwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  forward<Avx2Tile, T, Result>(call, begin, end, scratch);
}

template <typename T, typename Result>
MEGAZERO_AVX512 void forward_avx512(const ForwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  forward<Avx512Tile, T, Result>(call, begin, end, scratch);
}

template <typename T, typename Result>
void backward_baseline(const BackwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  backward<BaselineTile, T, Result>(call, begin, end, scratch);
}

template <typename T, typename Result>
MEGAZERO_AVX2 void backward_avx2(const BackwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  backward<Avx2Tile, T, Result>(call, begin, end, scratch);
}

template <typename T, typename Result>
MEGAZERO_AVX512 void backward_avx512(const BackwardCall& call, std::int64_t begin, std::int64_t end, float* scratch) {
  backward<Avx512Tile, T, Result>(call, begin, end, scratch);
}

// Divides the heads or groups of all samples among the threads.
template <typename Call, typename Work>
void divided(const Call& call, std::int64_t items, std::int64_t scratch, Work work) {
  const int workers = static_cast<int>(std::max<std::int64_t>(1, std::min(call.shape.threads, items)));
  // Vectors that straddle two cache lines cost twice, so each thread's memory begins with a line.
  constexpr std::int64_t line = 64 / sizeof(float);
  ThreadRows memory(workers, attention::up_to(scratch, line) + line);
  parallel_for(items, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t worker) {
    const auto from = reinterpret_cast<std::uintptr_t>(memory.of(worker));
    work(call, begin, end, reinterpret_cast<float*>((from + 63) / 64 * 64));
  });
}

// Calls body with an element of the operands' type and one of the results'.
template <typename Body>
void with_elements(const AttentionShape& shape, const Body& body) {
  if (!shape.narrow) return body(0.0f, 0.0f);
  if (shape.narrow_results) return body(Bf16{}, Bf16{});
  body(Bf16{}, 0.0f);
}

template <typename Work>
Work chosen(InstructionSet most, Work baseline, Work avx2, Work avx512) {
  switch (std::min(most, instruction_set())) {
    case InstructionSet::avx512:
      return avx512;
    case InstructionSet::avx2:
      return avx2;
    default:
      return baseline;
  }
}

}  // namespace
}  // namespace megazero

void megazero_attention_forward(megazero::AttentionShape shape, megazero::AttentionLimits limits,
                                megazero::HeadTensor q, megazero::HeadTensor k, megazero::HeadTensor v,
                                megazero::HeadTensor out, float* lse) {
  megazero::with_elements(shape, [&](auto element, auto result) {
    using T = decltype(element);
    using Result = decltype(result);
    const auto work = megazero::chosen(shape.most, &megazero::forward_baseline<T, Result>, &megazero::forward_avx2<T, Result>,
                                       &megazero::forward_avx512<T, Result>);
    const megazero::ForwardCall call{shape, limits, q, k, v, out, lse};
    megazero::divided(call, shape.samples * shape.heads, megazero::attention::Sizes(shape).forward_scratch(), work);
  });
}

void megazero_attention_backward(megazero::AttentionShape shape, megazero::AttentionLimits limits,
                                 megazero::HeadTensor q, megazero::HeadTensor k, megazero::HeadTensor v,
                                 megazero::HeadTensor out, const float* lse, megazero::HeadTensor grad,
                                 const float* grad_lse, megazero::HeadTensor grad_q,
                                 megazero::HeadTensor grad_k, megazero::HeadTensor grad_v) {
  megazero::with_elements(shape, [&](auto element, auto result) {
    using T = decltype(element);
    using Result = decltype(result);
    const auto work = megazero::chosen(shape.most, &megazero::backward_baseline<T, Result>, &megazero::backward_avx2<T, Result>,
                                       &megazero::backward_avx512<T, Result>);
    const megazero::BackwardCall call{shape, limits, q, k, v, out, lse, grad, grad_lse, grad_q, grad_k, grad_v};
    megazero::divided(call, shape.samples * shape.groups, megazero::attention::Sizes(shape).backward_scratch(), work);
  });
}
