// SGD over lists of segments, with heavy-ball momentum (Polyak 1964) and weight decay as a part of the gradient:
// u = momentum u + g + decay p, p = p - lr u.
#include "common/cuda_update.hpp"

namespace megazero {

struct SgdRule {
  float lr, momentum, decay;

  __device__ __forceinline__ void operator()(float& p, float g) const {
    p = __fmaf_rn(-lr, decayed_gradient(g, p, decay), p);
  }

  __device__ __forceinline__ void operator()(float& p, float g, float& u) const {
    u = __fmaf_rn(momentum, u, decayed_gradient(g, p, decay));
    p = __fmaf_rn(-lr, u, p);
  }
};

template <typename G, int MOMENTS>
__global__ void __launch_bounds__(kUpdateThreads)
    sgd_update(const __grid_constant__ UpdateSegments<MOMENTS> all, UpdateEnds ends, SgdRule rule) {
  update_chunk<G, MOMENTS>(all, ends, rule);
}

}  // namespace megazero

using namespace megazero;

// Without momentum, the list of sums u is null.
extern "C" int megazero_cuda_sgd_update(std::int64_t grad_dtype, std::int64_t weight_dtype, std::int64_t count,
                                        const std::int64_t* lengths, const std::int64_t* params,
                                        const std::int64_t* grads, const std::int64_t* weights,
                                        const std::int64_t* momentum_sums, double scale, const float* further_scale,
                                        const float* overflow, double lr, double momentum, double decay, void* stream) {
  const UpdateEnds ends = update_ends(scale, further_scale, overflow, weight_dtype);
  const SgdRule rule{static_cast<float>(lr), static_cast<float>(momentum), static_cast<float>(decay)};
  const UpdateLists lists{grad_dtype, weight_dtype, count, lengths, params, grads, weights};
  if (momentum_sums == nullptr) {
    return for_updates<0>(lists, {}, [&](auto gradient, auto& all, int chunks) {
      return MEGAZERO_LAUNCH((sgd_update<decltype(gradient), 0>), chunks, kUpdateThreads, 0, stream, all, ends, rule);
    });
  }
  return for_updates<1>(lists, {momentum_sums}, [&](auto gradient, auto& all, int chunks) {
    return MEGAZERO_LAUNCH((sgd_update<decltype(gradient), 1>), chunks, kUpdateThreads, 0, stream, all, ends, rule);
  });
}
MEGAZERO_EXPORT(sgd_update)
