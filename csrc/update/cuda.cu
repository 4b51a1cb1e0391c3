// The steps of the optimizers of rules.hpp over lists of segments: for each, a kernel and a function `<name>_update`.
#include "common/cuda_update.hpp"
#include "update/rules.hpp"

using namespace megazero;

// `states` are `count` addresses for each of `kinds`, one kind after the other.
#define MEGAZERO_UPDATE(name, Rule)                                                                                   \
  template <typename G, int KINDS>                                                                                    \
  __global__ void __launch_bounds__(kUpdateThreads)                                                                   \
      name##_update(const __grid_constant__ UpdateSegments<KINDS> all, UpdateEnds ends, Rule rule) {                  \
    update_chunk<G, KINDS>(all, ends, rule);                                                                          \
  }                                                                                                                   \
  extern "C" int megazero_cuda_##name##_update(                                                                       \
      std::int64_t grad_dtype, std::int64_t weight_dtype, std::int64_t count, const std::int64_t* lengths,            \
      const std::int64_t* params, const std::int64_t* grads, const std::int64_t* weights, std::int64_t kinds,         \
      const std::int64_t* states, double scale, const float* further_scale, const float* overflow,                    \
      const double* coefficients, void* stream) {                                                                     \
    const UpdateEnds ends = update_ends(scale, further_scale, overflow, weight_dtype);                                \
    const Rule rule = rule_of<Rule>(coefficients);                                                                    \
    const UpdateLists lists{grad_dtype, weight_dtype, count, lengths, params, grads, weights, states};                \
    int code = kInvalidValue;                                                                                         \
    with_kinds<Rule>(kinds, [&](auto number) {                                                                        \
      constexpr int kKinds = decltype(number)::value;                                                                 \
      code = for_updates<kKinds>(lists, [&](auto gradient, auto& all, int chunks) {                                   \
        return MEGAZERO_LAUNCH((name##_update<decltype(gradient), kKinds>), chunks, kUpdateThreads, 0, stream, all,   \
                               ends, rule);                                                                           \
      });                                                                                                             \
    });                                                                                                               \
    return code;                                                                                                      \
  }                                                                                                                   \
  MEGAZERO_EXPORT(name##_update)

MEGAZERO_RULES(MEGAZERO_UPDATE)
