// What a router's logits make of the experts that were chosen (Shazeer et al. 2017; sigmoid scores: DeepSeek-V3,
// arXiv:2412.19437). logits, probabilities: fp32 [count, experts]; chosen: int64 [count, k]; weights: fp32 [count, k].
//
// kind 0: probabilities p = softmax(logits), weights = the softmax over the chosen logits. 1: weights = the chosen p.
// 2: with s = sigmoid(logits), p = s / (sum(s) + tiny), weights = the chosen s, for k > 1 divided by their sum + tiny.
//
// A warp takes a row, which is read once from memory and then from the cache. Lane j holds the j-th choice; k is at
// most 32.
#include "common/cuda_rows.hpp"

namespace megazero {

constexpr int kSoftmaxAfter = 0, kSoftmaxBefore = 1, kSigmoid = 2;
constexpr int kGates = 8;  // rows, and warps, of a block
constexpr float kTiny = 1e-20f;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The lane's choice and its logit. A number that no expert has is none.
struct Choice {
  int expert = -1;
  float logit = 0.0f;

  __device__ __forceinline__ bool there() const { return expert >= 0; }
};

__device__ __forceinline__ Choice choice_of(std::int64_t row, int experts, int k, Cached<float> logits,
                                            Cached<std::int64_t> chosen) {
  Choice own;
  const int lane = threadIdx.x;
  if (lane >= k) return own;
  const std::int64_t expert = chosen[row * k + lane];
  if (expert < 0 || expert >= experts) return own;
  own.expert = static_cast<int>(expert);
  own.logit = logits[row * experts + expert];
  return own;
}

__global__ void __launch_bounds__(kGates* kWarp)
    gate_forward(std::int64_t count, int experts, int k, int kind, Cached<float> logits, Cached<std::int64_t> chosen,
                 Global<float> probabilities, Global<float> weights) {
  const std::int64_t row = first_row();
  if (row >= count) return;
  const int lane = threadIdx.x;
  const Cached<float> own = logits + row * experts;
  float most = -INFINITY, sum = 0.0f;
  if (kind != kSigmoid) {
    for (int e = lane; e < experts; e += kWarp) {
      const float logit = own[e];
      most = (logit > most || logit != logit) ? logit : most;
    }
    most = warp_max(most);
  }
  const auto score = [&](float logit) { return kind == kSigmoid ? sigmoid(logit) : expf(logit - most); };
  for (int e = lane; e < experts; e += kWarp) sum += score(own[e]);
  sum = warp_sum(sum);
  const float scale = 1.0f / (kind == kSigmoid ? sum + kTiny : sum);
  for (int e = lane; e < experts; e += kWarp) probabilities[row * experts + e] = score(own[e]) * scale;

  const Choice choice = choice_of(row, experts, k, logits, chosen);
  float weight = choice.there() ? score(choice.logit) : 0.0f;
  if (kind == kSoftmaxBefore) {
    weight *= scale;
  } else if (kind == kSoftmaxAfter) {
    const float highest = warp_max(choice.there() ? choice.logit : -INFINITY);
    weight = choice.there() ? expf(choice.logit - highest) : 0.0f;
  }
  if (kind == kSoftmaxAfter || (kind == kSigmoid && k > 1)) {
    weight /= warp_sum(weight) + (kind == kSigmoid ? kTiny : 0.0f);
  }
  if (lane < k) weights[row * k + lane] = weight;
}

// Gradients of both results to that of the logits. grad_probabilities and grad_weights may be null: zeros.
// For y = x / sum(x), grad_x = (grad_y - sum(grad_y y)) / sum(x), and of a softmax y (grad_y - sum(grad_y y)).
__global__ void __launch_bounds__(kGates* kWarp)
    gate_backward(std::int64_t count, int experts, int k, int kind, Cached<float> logits, Cached<std::int64_t> chosen,
                  Cached<float> probabilities, Global<const float> weights, Cached<float> grad_probabilities,
                  Global<const float> grad_weights, Global<float> grad_logits) {
  const std::int64_t row = first_row(), first = row * experts;
  if (row >= count) return;
  const int lane = threadIdx.x;
  const Choice choice = choice_of(row, experts, k, logits, chosen);
  const bool has_weight = lane < k && grad_weights;
  const float weight = has_weight ? static_cast<float>(weights[row * k + lane]) : 0.0f;
  float through = has_weight ? static_cast<float>(grad_weights[row * k + lane]) : 0.0f;  // to the choice's score
  if (kind == kSoftmaxAfter) {
    through = weight * (through - warp_sum(through * weight));
  } else if (kind == kSigmoid && k > 1) {
    const float scores = warp_sum(choice.there() ? sigmoid(choice.logit) : 0.0f);
    through = (through - warp_sum(through * weight)) / (scores + kTiny);
  }
  float total = 0.0f, sum = 0.0f;
  for (int e = lane; e < experts; e += kWarp) {
    if (grad_probabilities) total += grad_probabilities[first + e] * probabilities[first + e];
    if (kind == kSigmoid) sum += sigmoid(logits[first + e]);
  }
  // With the softmax before the choice, the weights are probabilities too.
  if (kind == kSoftmaxBefore) total += through * weight;
  total = warp_sum(total);
  sum = warp_sum(sum);
  for (int begin = 0; begin < experts; begin += kWarp) {
    const int e = begin + lane;
    float more = 0.0f;
    for (int j = 0; j < k; ++j) {
      const int expert = __shfl_sync(kAllLanes, choice.expert, j);
      const float added = __shfl_sync(kAllLanes, through, j);
      if (expert == e) more += added;
    }
    if (e >= experts) continue;
    const float own = grad_probabilities ? static_cast<float>(grad_probabilities[first + e]) : 0.0f;
    if (kind == kSigmoid) {
      const float s = sigmoid(logits[first + e]);
      grad_logits[first + e] = ((own - total) / (sum + kTiny) + more) * s * (1.0f - s);
    } else {
      const float p = probabilities[first + e];
      grad_logits[first + e] = kind == kSoftmaxBefore ? p * (own + more - total) : p * (own - total) + more;
    }
  }
}

inline bool gate_fits(std::int64_t experts, std::int64_t k, std::int64_t kind) {
  return k >= 0 && k <= kWarp && experts <= 2147483647 - kWarp && kind >= kSoftmaxAfter && kind <= kSigmoid;
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_gate_forward(std::int64_t count, std::int64_t experts, std::int64_t k, std::int64_t kind,
                                          const float* logits, const std::int64_t* chosen, float* probabilities,
                                          float* weights, void* stream) {
  if (!gate_fits(experts, k, kind)) return 1;
  if (count == 0) return 0;
  return MEGAZERO_LAUNCH((gate_forward), ceil_div(count, kGates), dim3(kWarp, kGates), 0, stream, count, experts, k,
                         kind, logits, chosen, probabilities, weights);
}
MEGAZERO_EXPORT(gate_forward)

extern "C" int megazero_cuda_gate_backward(std::int64_t count, std::int64_t experts, std::int64_t k, std::int64_t kind,
                                           const float* logits, const std::int64_t* chosen, const float* probabilities,
                                           const float* weights, const float* grad_probabilities,
                                           const float* grad_weights, float* grad_logits, void* stream) {
  if (!gate_fits(experts, k, kind)) return 1;
  if (count == 0) return 0;
  return MEGAZERO_LAUNCH((gate_backward), ceil_div(count, kGates), dim3(kWarp, kGates), 0, stream, count, experts, k,
                         kind, logits, chosen, probabilities, weights, grad_probabilities, grad_weights, grad_logits);
}
MEGAZERO_EXPORT(gate_backward)
