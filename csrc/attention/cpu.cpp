#include "attention/cpu.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>

#include "attention/blocks.hpp"
#include "common/numbers.hpp"
#include "common/parallel.hpp"
#include "common/targets.hpp"

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
  using namespace attention;
  const AttentionShape& shape = call.shape;
  const Sizes sizes(shape);
  auto* notes = reinterpret_cast<PanelNote*>(scratch);
  Backward memory(sizes, scratch + sizes.notes());
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t sample = i / shape.groups, group = i % shape.groups;
    const T *k = head_of<const T>(call.k, sample, group), *v = head_of<const T>(call.v, sample, group);
    Result *grad_k = head_of<Result>(call.grad_k, sample, group), *grad_v = head_of<Result>(call.grad_v, sample, group);
    const auto clear = [&] {
      std::fill(memory.grad_k, memory.grad_k + 2 * sizes.summed_keys() * sizes.row, 0.0f);  // and grad_v, behind it
    };
    const auto write = [&](std::int64_t start, std::int64_t count) {
      copy_out(memory.grad_k, count, sizes, 1.0f, grad_k + start * call.grad_k.row, call.grad_k.row);
      copy_out(memory.grad_v, count, sizes, 1.0f, grad_v + start * call.grad_v.row, call.grad_v.row);
    };
    const bool alone = sizes.sharers == 1;
    if (!alone) clear();
    for (std::int64_t head = group * sizes.sharers; head < (group + 1) * sizes.sharers; ++head) {
      const Visible visible(shape, call.limits, sample, head, notes);
      if (head == group * sizes.sharers) visible.note_panels();
      const std::int64_t number = (sample * shape.heads + head) * shape.queries;
      copy_in(head_of<const T>(call.q, sample, head), call.q.row, sizes.queries, sizes, shape.scale, memory.queries,
              sizes.all_queries);
      copy_in(head_of<const T>(call.grad, sample, head), call.grad.row, sizes.queries, sizes, 1.0f, memory.grads,
              sizes.all_queries);
      row_terms(head_of<const T>(call.out, sample, head), call.out.row, sizes, memory.grads,
                call.grad_lse == nullptr ? nullptr : call.grad_lse + number, memory.delta);
      std::fill(memory.grad_q, memory.grad_q + sizes.all_queries * sizes.row, 0.0f);
      for (std::int64_t start = 0; start < sizes.keys; start += kKeys) {
        const std::int64_t at = alone ? 0 : start * sizes.row;
        if (alone) clear();
        memory.read(sizes, k, call.k.row, v, call.v.row, start);
        backward_block<Set>(sizes, visible, call.lse + number, start, memory.grad_k + at, memory.grad_v + at, memory);
        if (alone) write(start, std::min(kKeys, sizes.keys - start));
      }
      copy_out(memory.grad_q, sizes.queries, sizes, shape.scale, head_of<Result>(call.grad_q, sample, head),
               call.grad_q.row);
    }
    if (!alone) write(0, sizes.keys);
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

// Memory that is not filled. Where there is much of it, its first touch costs as much as a product, and less by far in
// large pages, of which a small call would clear more than it needs.
class Scratch {
 public:
  explicit Scratch(std::size_t floats) {
    const std::size_t bytes = floats * sizeof(float), page = bytes < kMuch ? kLine : kLargePage;
    at_ = std::aligned_alloc(page, (bytes / page + 1) * page);
    if (at_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (page == kLargePage) madvise(at_, bytes, MADV_HUGEPAGE);  // advice: nothing is lost if it is not taken
#endif
  }
  ~Scratch() { std::free(at_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* from(std::int64_t floats) const { return static_cast<float*>(at_) + floats; }

 private:
  static constexpr std::size_t kLine = 64, kLargePage = std::size_t{1} << 21, kMuch = std::size_t{1} << 24;
  void* at_;
};

// Divides the heads or groups of all samples among the threads.
template <typename Call, typename Work>
void divided(const Call& call, std::int64_t items, std::int64_t scratch, Work work) {
  const int workers = static_cast<int>(std::max<std::int64_t>(1, std::min(call.shape.threads, items)));
  // Vectors that straddle two cache lines cost twice, so each thread's memory begins with a line.
  const std::int64_t own = attention::up_to(scratch, 64 / sizeof(float));
  const Scratch memory(static_cast<std::size_t>(workers * own));
  parallel_for(items, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t worker) {
    work(call, begin, end, memory.from(worker * own));
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
