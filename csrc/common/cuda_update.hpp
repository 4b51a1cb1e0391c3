// One pass of an optimizer over lists of segments: gradients as they are stored, fp32 masters and moments in place, and
// the weights that the model uses, rounded. Its arithmetic is spelled in operations that no compiler fuses or reorders,
// so an element's bits are the same wherever its segment is cut, and on every device.
//
// What a step depends on may lie on the device, so that the host need not wait for it: the gradients' factor, and
// whether the step is to change anything.
#pragma once

#include "common/cuda_segments.hpp"

namespace megazero {

constexpr int kUpdatePack = 4;
constexpr int kUpdateThreads = 256;
constexpr std::int64_t kUpdateChunk = 4096;
constexpr std::int64_t kNoWeights = -1;  // a dtype's code: the masters are the only weights

// Buffers: masters, gradients, the model's weights, and then the moments.
enum UpdateBuffer { kMasters, kGradients, kWeights, kMoments };

template <int MOMENTS>
using UpdateSegments = Segments<kMoments + MOMENTS, kUpdatePack>;
static_assert(sizeof(UpdateSegments<2>) <= 4096 - 128, "a launch takes 4 KiB of arguments everywhere");

// What is around masters and moments.
struct UpdateEnds {
  float scale;
  int weights;                // their dtype's code or kNoWeights
  Cached<float> further_scale;  // a factor on the device, or null
  Cached<float> overflow;       // not zero: change nothing; or null

  __device__ __forceinline__ bool skipped() const { return overflow && overflow[0] != 0.0f; }

  __device__ __forceinline__ float factor() const {
    return further_scale ? __fmul_rn(scale, further_scale[0]) : scale;
  }
};

inline UpdateEnds update_ends(double scale, const float* further_scale, const float* overflow, std::int64_t weights) {
  return {static_cast<float>(scale), static_cast<int>(weights), further_scale, overflow};
}

template <typename W, int N>
__device__ __forceinline__ void store_rounded(Global<W> to, std::int64_t i, const Pack<float, N>& from) {
  Pack<W, N> pack;
#pragma unroll
  for (int n = 0; n < N; ++n) pack.at[n] = from_float<W>(from.at[n]);
  store_pack<N>(to, i, pack);
}

// Writes masters where the model has weights of its own.
template <int N, typename List>
__device__ __forceinline__ void store_weights(const List& all, int segment, int dtype, std::int64_t i,
                                              const Pack<float, N>& from) {
  if (all.at[kWeights][segment] == nullptr) return;
  if (dtype == 0) store_rounded(all.template buffer<float>(kWeights, segment), i, from);
  if (dtype == 1) store_rounded(all.template buffer<F16>(kWeights, segment), i, from);
  if (dtype == 2) store_rounded(all.template buffer<Bf16>(kWeights, segment), i, from);
}

// N gradients from i on, in float and scaled.
template <typename G, int N, typename List>
__device__ __forceinline__ Pack<float, N> scaled_gradients(const List& all, int segment, std::int64_t i, float factor) {
  const auto stored = load_pack<N>(all.template buffer<const G>(kGradients, segment), i);
  Pack<float, N> gradients;
#pragma unroll
  for (int n = 0; n < N; ++n) gradients.at[n] = __fmul_rn(to_float(stored.at[n]), factor);
  return gradients;
}

// This block's chunk; `rule(p, g)`, `rule(p, g, m)` or `rule(p, g, m, v)` moves an element.
template <typename G, int MOMENTS, typename Rule>
__device__ __forceinline__ void update_chunk(const UpdateSegments<MOMENTS>& all, const UpdateEnds& ends,
                                             const Rule& rule) {
  if (ends.skipped()) return;
  const float factor = ends.factor();
  const Chunk chunk = all.chunk_of(static_cast<int>(blockIdx.x));
  const int segment = chunk.segment;
  all.each_pack(chunk, [&](std::int64_t i, auto pack) {
    constexpr int N = decltype(pack)::value;
    const Global<float> masters = all.template buffer<float>(kMasters, segment);
    const auto gradients = scaled_gradients<G, N>(all, segment, i, factor);
    auto p = load_pack<N>(masters, i);
    Pack<float, N> moments[MOMENTS > 0 ? MOMENTS : 1];
#pragma unroll
    for (int k = 0; k < MOMENTS; ++k) moments[k] = load_pack<N>(all.template buffer<float>(kMoments + k, segment), i);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (MOMENTS == 0) {
        rule(p.at[n], gradients.at[n]);
      } else if constexpr (MOMENTS == 1) {
        rule(p.at[n], gradients.at[n], moments[0].at[n]);
      } else {
        rule(p.at[n], gradients.at[n], moments[0].at[n], moments[1].at[n]);
      }
    }
    store_pack<N>(masters, i, p);
#pragma unroll
    for (int k = 0; k < MOMENTS; ++k) store_pack<N>(all.template buffer<float>(kMoments + k, segment), i, moments[k]);
    store_weights<N>(all, segment, ends.weights, i, p);
  });
}

// The size of an element with that code; 0 for kNoWeights.
inline std::size_t element_size(std::int64_t dtype) {
  return dtype == kNoWeights ? 0 : dtype == 0 ? sizeof(float) : sizeof(F16);
}

// A launch's lists as Python gives them, `count` addresses each; those of weights may be 0, and those of the states are
// behind each other.
struct UpdateLists {
  std::int64_t grad_dtype, weight_dtype, count;
  const std::int64_t *lengths, *params, *grads, *weights, *states;
};

// Calls start(gradient, segments, chunks) for one batch of the lists after the other, with an element of the gradients'
// type; returns the first error's code.
template <int MOMENTS, typename Start>
int for_updates(const UpdateLists& lists, const Start& start) {
  return with_element(lists.grad_dtype, [&](auto gradient) {
    BufferList buffers[kMoments + MOMENTS] = {{lists.params, sizeof(float)},
                                              {lists.grads, sizeof(gradient)},
                                              {lists.weights, element_size(lists.weight_dtype)}};
    for (int k = 0; k < MOMENTS; ++k) buffers[kMoments + k] = {lists.states + k * lists.count, sizeof(float)};
    return for_segments<UpdateSegments<MOMENTS>>(
        lists.count, lists.lengths, buffers, kUpdateChunk,
        [&](auto& all, int chunks, auto) { return chunks == 0 ? 0 : start(gradient, all, chunks); });
  });
}

// The words of csrc/update/rules.hpp.
#define MEGAZERO_RULE __device__ __forceinline__

// a b + c, rounded once.
MEGAZERO_RULE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// a x + b y, of which one product is rounded by itself.
MEGAZERO_RULE float sum_rounding_first(float a, float x, float b, float y) { return __fmaf_rn(b, y, __fmul_rn(a, x)); }

MEGAZERO_RULE float sum_rounding_second(float a, float x, float b, float y) { return __fmaf_rn(a, x, __fmul_rn(b, y)); }

// x / (sqrt(square) + eps).
MEGAZERO_RULE float over_root(float x, float square, float eps) {
  return __fdiv_rn(x, __fadd_rn(__fsqrt_rn(square), eps));
}

// The weighted sum m + share (x - m), as torch's lerp has it.
MEGAZERO_RULE float moved_towards(float m, float x, float share) { return __fmaf_rn(share, __fsub_rn(x, m), m); }

// Gradient plus decay p; a decay of 0 leaves the gradient alone, whatever p is.
MEGAZERO_RULE float decayed_gradient(float g, float p, float decay) {
  return decay != 0.0f ? __fmaf_rn(decay, p, g) : g;
}

}  // namespace megazero
