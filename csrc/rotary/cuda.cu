// Rotary position embedding (Su et al. 2021), halves convention: of a head's `dim` channels, i and i + half turn by
// angle i, and those from 2 half on pass through. x: [s, b, heads, dim] with strides of its own but for the last; y: the
// same, contiguous. cos, sin: fp32 [s, b, half], or [s, half] if all samples have the same positions. direction: 1, or
// -1 for the gradient.
#include "common/cuda.hpp"

namespace megazero {

constexpr int kRotaryThreads = 256;

// Where the elements of a tensor [s, b, heads, dim] are.
struct HeadStrides {
  std::int64_t position, sample, head;
};

// N elements from the row's i-th on.
template <int N, typename Pointer>
__device__ __forceinline__ void load_floats(Pointer row, int i, float (&to)[N]) {
  using T = MEGAZERO_ELEMENT(row);
  constexpr int kAtOnce = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
#pragma unroll
  for (int part = 0; part < N; part += kAtOnce) {
    const auto pack = load_pack<kAtOnce>(row, i + part);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) to[part + n] = to_float(pack.at[n]);
  }
}

// A thread turns a pack of a head's first half and that of the second, or copies a pack of the rest; the threads with
// the same y take a token (a position of a sample).
template <typename T, int N>
__global__ void __launch_bounds__(kRotaryThreads)
    rotary(std::int64_t tokens, int samples, int heads, int dim, int half, Global<const T> x, HeadStrides strides,
           Cached<float> cos, Cached<float> sin, bool by_sample, float direction, Global<T> y) {
  const int turned = half / N, packs = turned + (dim - 2 * half) / N;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const std::int64_t position = token / samples, sample = token - position * samples;
  const std::int64_t angles = (by_sample ? token : position) * half;
  for (int i = threadIdx.x; i < heads * packs; i += blockDim.x) {
    const int head = i / packs, pack = i - head * packs;
    const Global<const T> from = x + (position * strides.position + sample * strides.sample + head * strides.head);
    const Global<T> to = y + (token * heads + head) * dim;
    if (pack >= turned) {
      const int at = 2 * half + (pack - turned) * N;
      store_pack<N>(to, at, load_pack<N>(from, at));
      continue;
    }
    const int at = pack * N;
    const auto first = load_pack<N>(from, at), second = load_pack<N>(from, at + half);
    float c[N], s[N];
    load_floats<N>(cos + angles, at, c);
    load_floats<N>(sin + angles, at, s);
    Pack<T, N> left, right;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float a = to_float(first.at[n]), b = to_float(second.at[n]), turn = direction * s[n];
      left.at[n] = from_float<T>(a * c[n] - b * turn);
      right.at[n] = from_float<T>(b * c[n] + a * turn);
    }
    store_pack<N>(to, at, left);
    store_pack<N>(to, at + half, right);
  }
}

}  // namespace megazero

using namespace megazero;

extern "C" int megazero_cuda_rotary(std::int64_t dtype, std::int64_t positions, std::int64_t samples,
                                    std::int64_t heads, std::int64_t dim, std::int64_t half, const void* x,
                                    std::int64_t position_stride, std::int64_t sample_stride, std::int64_t head_stride,
                                    const float* cos, const float* sin, std::int64_t by_sample, double direction,
                                    void* y, void* stream) {
  const std::int64_t tokens = positions * samples;
  if (tokens == 0 || heads == 0 || dim == 0) return 0;
  if (heads * dim > 2147483647 - kRotaryThreads || samples > 2147483647) return 1;
  const HeadStrides strides{position_stride, sample_stride, head_stride};
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const auto start = [&](auto pack) {
      constexpr int N = pack();
      const std::int64_t jobs = heads * (half / N + (dim - 2 * half) / N);
      unsigned across = kWarp;
      while (across < kRotaryThreads && across < jobs) across *= 2;
      const dim3 threads(across, kRotaryThreads / across);
      return MEGAZERO_LAUNCH((rotary<T, N>), ceil_div(tokens, threads.y), threads, 0, stream, tokens, samples, heads,
                             dim, half, static_cast<const T*>(x), strides, cos, sin, by_sample, direction,
                             static_cast<T*>(y));
    };
    constexpr int kPack = 16 / static_cast<int>(sizeof(T));
    const auto in_packs = [](std::int64_t elements) { return elements % kPack == 0; };
    const bool packs = in_packs(dim) && in_packs(half) && in_packs(position_stride) && in_packs(sample_stride) &&
                       in_packs(head_stride) && aligned(x, 16) && aligned(y, 16) && aligned(cos, 16) &&
                       aligned(sin, 16);
    return packs ? start(std::integral_constant<int, kPack>{}) : start(std::integral_constant<int, 1>{});
  });
}
MEGAZERO_EXPORT(rotary)
