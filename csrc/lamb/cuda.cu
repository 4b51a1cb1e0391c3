// The two passes of LAMB (You et al. 2020, algorithm 2) over lists of segments, each a piece of one parameter.
// With Adam's moments m and v, the update is u = factor m / (sqrt(v) + eps) + decay p.
//
// The first pass moves m and v and adds up the squares of p and of u, in double: squares neither overflow, nor does a
// long sum lose its small terms. Each chunk has sums of its own, which are then added in their order, so the norms
// repeat bit for bit. The second pass is p = p - rate u, with a rate for each segment on the device; it computes u once
// more, since to keep it would take as much memory as a moment.
#include "common/cuda_update.hpp"

namespace megazero {

struct LambUpdate {
  float factor, eps, decay;

  __device__ __forceinline__ float operator()(float p, float m, float v) const {
    const float u = __fmul_rn(factor, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), eps)));
    return decayed_gradient(u, p, decay);
  }
};

struct LambMoments {
  float mean_share, keep, square_share;

  __device__ __forceinline__ void operator()(float g, float& m, float& v) const {
    m = moved_towards(m, g, mean_share);
    v = __fmaf_rn(__fmul_rn(square_share, g), g, __fmul_rn(keep, v));
  }
};

// Buffers: masters, gradients, no weights, m and v. partials: [chunks, 2].
template <typename G>
__global__ void __launch_bounds__(kUpdateThreads)
    lamb_moments(const __grid_constant__ UpdateSegments<2> all, UpdateEnds ends, LambMoments moments, LambUpdate update,
                 Global<double> partials) {
  double sums[2] = {0.0, 0.0};
  if (!ends.skipped()) {
    const float factor = ends.factor();
    const Chunk chunk = all.chunk_of(static_cast<int>(blockIdx.x));
    const int segment = chunk.segment;
    all.each_pack(chunk, [&](std::int64_t i, auto pack) {
      constexpr int N = decltype(pack)::value;
      const Global<float> means = all.buffer<float>(kMoments, segment), squares = all.buffer<float>(kMoments + 1, segment);
      const auto gradients = scaled_gradients<G, N>(all, segment, i, factor);
      const auto p = load_pack<N>(all.buffer<const float>(kMasters, segment), i);
      auto m = load_pack<N>(means, i), v = load_pack<N>(squares, i);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        moments(gradients.at[n], m.at[n], v.at[n]);
        const double weight = p.at[n], moved = update(p.at[n], m.at[n], v.at[n]);
        sums[0] += weight * weight;
        sums[1] += moved * moved;
      }
      store_pack<N>(means, i, m);
      store_pack<N>(squares, i, v);
    });
  }
  block_sums(sums);
  if (threadIdx.x == 0) store_pack<2>(partials, 2 * static_cast<std::int64_t>(blockIdx.x), Pack<double, 2>{sums[0], sums[1]});
}

// Block k adds up what the chunks of segment k have: sums: [segments, 2].
__global__ void __launch_bounds__(kUpdateThreads)
    lamb_sums(const __grid_constant__ UpdateSegments<2> all, Global<const double> partials, Global<double> sums) {
  double found[2] = {0.0, 0.0};
  const int end = all.first_chunk[blockIdx.x + 1];
  for (int chunk = all.first_chunk[blockIdx.x] + static_cast<int>(threadIdx.x); chunk < end; chunk += blockDim.x) {
    const auto own = load_pack<2>(partials, 2 * static_cast<std::int64_t>(chunk));
    found[0] += own.at[0];
    found[1] += own.at[1];
  }
  block_sums(found);
  if (threadIdx.x == 0) store_pack<2>(sums, 2 * static_cast<std::int64_t>(blockIdx.x), Pack<double, 2>{found[0], found[1]});
}

// Buffers of the second pass: masters, the segment's rate where others have gradients, weights, m and v.
__global__ void __launch_bounds__(kUpdateThreads)
    lamb_move(const __grid_constant__ UpdateSegments<2> all, UpdateEnds ends, LambUpdate update) {
  if (ends.skipped()) return;
  const Chunk chunk = all.chunk_of(static_cast<int>(blockIdx.x));
  const int segment = chunk.segment;
  const Cached<float> rates = static_cast<const float*>(all.at[kGradients][segment]);
  const float rate = rates[0];
  all.each_pack(chunk, [&](std::int64_t i, auto pack) {
    constexpr int N = decltype(pack)::value;
    const Global<float> masters = all.buffer<float>(kMasters, segment);
    auto p = load_pack<N>(masters, i);
    const auto m = load_pack<N>(all.buffer<const float>(kMoments, segment), i);
    const auto v = load_pack<N>(all.buffer<const float>(kMoments + 1, segment), i);
#pragma unroll
    for (int n = 0; n < N; ++n) p.at[n] = __fmaf_rn(-rate, update(p.at[n], m.at[n], v.at[n]), p.at[n]);
    store_pack<N>(masters, i, p);
    store_weights<N>(all, segment, ends.weights, i, p);
  });
}

inline LambUpdate lamb_update(double factor, double eps, double decay) {
  return {static_cast<float>(factor), static_cast<float>(eps), static_cast<float>(decay)};
}

}  // namespace megazero

using namespace megazero;

// `absent` are as many zeros as there are segments. partials: scratch of at least 2 (sum of length / chunk + 2) doubles,
// on a multiple of 16 bytes as sums is; sums: [count, 2], of p and of u.
extern "C" int megazero_cuda_lamb_norms(std::int64_t grad_dtype, std::int64_t count, std::int64_t chunk,
                                        const std::int64_t* lengths, const std::int64_t* params,
                                        const std::int64_t* grads, const std::int64_t* absent,
                                        const std::int64_t* exp_avgs, const std::int64_t* exp_avg_sqs, double scale,
                                        const float* further_scale, const float* overflow, double beta1, double beta2,
                                        double factor, double eps, double decay, double* partials, double* sums,
                                        void* stream) {
  const UpdateEnds ends = update_ends(scale, further_scale, overflow, kNoWeights);
  const LambMoments moments{static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2)};
  const LambUpdate update = lamb_update(factor, eps, decay);
  return with_element(grad_dtype, [&](auto element) {
    using G = decltype(element);
    const BufferList lists[] = {{params, sizeof(float)},
                                {grads, sizeof(G)},
                                {absent, 0},
                                {exp_avgs, sizeof(float)},
                                {exp_avg_sqs, sizeof(float)}};
    return for_segments<UpdateSegments<2>>(count, lengths, lists, chunk, [&](auto& all, int chunks, std::int64_t first) {
      const int code = chunks == 0 ? 0
                                   : MEGAZERO_LAUNCH((lamb_moments<G>), chunks, kUpdateThreads, 0, stream, all, ends,
                                                     moments, update, partials);
      if (code != 0) return code;
      return MEGAZERO_LAUNCH((lamb_sums), all.count, kUpdateThreads, 0, stream, all, partials, sums + 2 * first);
    });
  });
}
MEGAZERO_EXPORT(lamb_norms)

// rates: the address of each segment's rate.
extern "C" int megazero_cuda_lamb_move(std::int64_t weight_dtype, std::int64_t count, const std::int64_t* lengths,
                                       const std::int64_t* params, const std::int64_t* rates,
                                       const std::int64_t* weights, const std::int64_t* exp_avgs,
                                       const std::int64_t* exp_avg_sqs, const float* overflow, double factor, double eps,
                                       double decay, void* stream) {
  const UpdateEnds ends = update_ends(1.0, nullptr, overflow, weight_dtype);
  const LambUpdate update = lamb_update(factor, eps, decay);
  const BufferList lists[] = {{params, sizeof(float)},
                              {rates, 0},
                              {weights, element_size(weight_dtype)},
                              {exp_avgs, sizeof(float)},
                              {exp_avg_sqs, sizeof(float)}};
  return for_segments<UpdateSegments<2>>(count, lengths, lists, kUpdateChunk, [&](auto& all, int chunks, auto) {
    if (chunks == 0) return 0;
    return MEGAZERO_LAUNCH((lamb_move), chunks, kUpdateThreads, 0, stream, all, ends, update);
  });
}
MEGAZERO_EXPORT(lamb_move)
