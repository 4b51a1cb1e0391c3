// AdamW (Loshchilov & Hutter 2019; moments of Kingma & Ba 2015) over lists of segments:
// m = m + (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, p = decay p - rate m / (sqrt(v) + eps),
// with the corrections of both moments in rate and eps.
#include "common/cuda_update.hpp"

namespace megazero {

struct AdamRule {
  float mean_share, keep, square_share, rate, eps, decay;

  __device__ __forceinline__ void operator()(float& p, float g, float& m, float& v) const {
    m = moved_towards(m, g, mean_share);
    v = __fmaf_rn(__fmul_rn(square_share, g), g, __fmul_rn(keep, v));
    const float quotient = __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), eps));
    p = __fmaf_rn(-rate, quotient, __fmul_rn(decay, p));
  }
};

template <typename G>
__global__ void __launch_bounds__(kUpdateThreads)
    adam_update(const __grid_constant__ UpdateSegments<2> all, UpdateEnds ends, AdamRule rule) {
  update_chunk<G, 2>(all, ends, rule);
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_adam_update(std::int64_t grad_dtype, std::int64_t weight_dtype, std::int64_t count,
                                         const std::int64_t* lengths, const std::int64_t* params,
                                         const std::int64_t* grads, const std::int64_t* weights,
                                         const std::int64_t* exp_avgs, const std::int64_t* exp_avg_sqs, double scale,
                                         const float* further_scale, const float* overflow, double beta1, double beta2,
                                         double rate, double eps, double decay, void* stream) {
  const UpdateEnds ends = update_ends(scale, further_scale, overflow, weight_dtype);
  const AdamRule rule{static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2),
                      static_cast<float>(rate),        static_cast<float>(eps),   static_cast<float>(decay)};
  const UpdateLists lists{grad_dtype, weight_dtype, count, lengths, params, grads, weights};
  return for_updates<2>(lists, {exp_avgs, exp_avg_sqs}, [&](auto gradient, auto& all, int chunks) {
    return MEGAZERO_LAUNCH((adam_update<decltype(gradient)>), chunks, kUpdateThreads, 0, stream, all, ends, rule);
  });
}
MEGAZERO_EXPORT(adam_update)
