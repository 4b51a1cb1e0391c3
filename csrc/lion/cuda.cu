// Lion (Chen et al. 2023, algorithm 2) over lists of segments:
// p = decay p - lr sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.
#include "common/cuda_update.hpp"

namespace megazero {

struct LionRule {
  float beta1, share, mean_share, lr, decay;

  __device__ __forceinline__ void operator()(float& p, float g, float& m) const {
    const float direction = __fmaf_rn(beta1, m, __fmul_rn(share, g));
    m = moved_towards(m, g, mean_share);
    // NaN has no sign, as in torch.
    const float move = direction > 0.0f ? lr : (direction < 0.0f ? -lr : 0.0f);
    p = __fsub_rn(__fmul_rn(decay, p), move);
  }
};

template <typename G>
__global__ void __launch_bounds__(kUpdateThreads)
    lion_update(const __grid_constant__ UpdateSegments<1> all, UpdateEnds ends, LionRule rule) {
  update_chunk<G, 1>(all, ends, rule);
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_lion_update(std::int64_t grad_dtype, std::int64_t weight_dtype, std::int64_t count,
                                         const std::int64_t* lengths, const std::int64_t* params,
                                         const std::int64_t* grads, const std::int64_t* weights,
                                         const std::int64_t* exp_avgs, double scale, const float* further_scale,
                                         const float* overflow, double beta1, double beta2, double lr, double decay,
                                         void* stream) {
  const UpdateEnds ends = update_ends(scale, further_scale, overflow, weight_dtype);
  const LionRule rule{static_cast<float>(beta1), static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2),
                      static_cast<float>(lr), static_cast<float>(decay)};
  const UpdateLists lists{grad_dtype, weight_dtype, count, lengths, params, grads, weights};
  return for_updates<1>(lists, {exp_avgs}, [&](auto gradient, auto& all, int chunks) {
    return MEGAZERO_LAUNCH((lion_update<decltype(gradient)>), chunks, kUpdateThreads, 0, stream, all, ends, rule);
  });
}
MEGAZERO_EXPORT(lion_update)
