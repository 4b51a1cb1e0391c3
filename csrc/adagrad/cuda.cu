// Adagrad (Duchi et al. 2011) over lists of segments, with weight decay as a part of the gradient g:
// total = total + g^2, p = p - lr g / (sqrt(total) + eps).
#include "common/cuda_update.hpp"

namespace megazero {

struct AdagradRule {
  float lr, eps, decay;

  __device__ __forceinline__ void operator()(float& p, float gradient, float& total) const {
    const float g = decayed_gradient(gradient, p, decay);
    total = __fmaf_rn(g, g, total);
    p = __fmaf_rn(-lr, __fdiv_rn(g, __fadd_rn(__fsqrt_rn(total), eps)), p);
  }
};

template <typename G>
__global__ void __launch_bounds__(kUpdateThreads)
    adagrad_update(const __grid_constant__ UpdateSegments<1> all, UpdateEnds ends, AdagradRule rule) {
  update_chunk<G, 1>(all, ends, rule);
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_adagrad_update(std::int64_t grad_dtype, std::int64_t weight_dtype, std::int64_t count,
                                            const std::int64_t* lengths, const std::int64_t* params,
                                            const std::int64_t* grads, const std::int64_t* weights,
                                            const std::int64_t* totals, double scale, const float* further_scale,
                                            const float* overflow, double lr, double eps, double decay, void* stream) {
  const UpdateEnds ends = update_ends(scale, further_scale, overflow, weight_dtype);
  const AdagradRule rule{static_cast<float>(lr), static_cast<float>(eps), static_cast<float>(decay)};
  const UpdateLists lists{grad_dtype, weight_dtype, count, lengths, params, grads, weights};
  return for_updates<1>(lists, {totals}, [&](auto gradient, auto& all, int chunks) {
    return MEGAZERO_LAUNCH((adagrad_update<decltype(gradient)>), chunks, kUpdateThreads, 0, stream, all, ends, rule);
  });
}
MEGAZERO_EXPORT(adagrad_update)
