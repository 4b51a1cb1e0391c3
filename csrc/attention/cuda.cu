// Attention of heads in blocks (Dao et al. 2022), which never hold more of the scores than a tile: forward with a running
// maximum, backward from the log-sum-exp, with dropout's mask made where it is used. q, out: [queries, samples, heads,
// size]; k, v: [keys, samples, groups, size], and a group serves the same number of heads each. lse: [samples, heads,
// queries], -inf for a query that sees nothing, whose result is zeros.
//
// A block has kOwn rows: of queries forward and for their gradients, of keys for those of keys and values, which go
// through all heads of their group. So every sum has one owner and one order: the same bits in each run. Sizes are
// multiples of 8, and at most 128; rows begin at multiples of 16 bytes.
#include "attention/cuda_blocks.hpp"

namespace megazero::attention {

// Calls body with the dtype's element and the tile's channels.
template <typename Body>
int with_tile(std::int64_t dtype, std::int64_t size, const Body& body) {
  if (size < 1 || size > 128 || size % 8 != 0) return kInvalidValue;
  return with_element(dtype, [&](auto element) {
    if (size <= 32) return body(element, std::integral_constant<int, 32>{});
    if (size <= 64) return body(element, std::integral_constant<int, 64>{});
    return body(element, std::integral_constant<int, 128>{});
  });
}

// The numbers of a call, as the ABI has them: an array, in this order.
struct Numbers {
  std::int64_t queries, keys, samples, heads, groups, size, left, right;
  std::int64_t shares;            // of the heads of a group: gradients of keys and values have groups * shares
  std::int64_t wide;              // results are fp32: 1 for those of queries, 2 for gradients of keys and values, 3 for all
  std::int64_t q[3], k[3], v[3];  // strides of rows, samples and heads
  std::int64_t mask[4];           // of samples, heads, queries and keys
  std::int64_t key_row, head_offset, threshold;
  std::int64_t query_places[4], key_places[4];  // start, step, strides of rows and samples

  bool fit() const {
    return queries > 0 && keys > 0 && samples > 0 && groups > 0 && queries < kNoLimit && keys < kNoLimit &&
           left <= kNoLimit && right <= kNoLimit && samples * heads * size < kNoLimit && q[0] < kNoLimit &&
           k[0] < kNoLimit && v[0] < kNoLimit && samples <= 65535 && heads <= 65535 && shares > 0 &&
           heads % (groups * shares) == 0;
  }

  Visible visible(const void* first, const void* stop, const void* bytes) const {
    const auto as = [](std::int64_t number) { return static_cast<int>(number); };
    return {as(queries), as(keys), as(left), as(right), static_cast<const int*>(first), static_cast<const int*>(stop),
            static_cast<const std::uint8_t*>(bytes), mask[0], mask[1], mask[2], mask[3]};
  }

  Drops drops(const void* of_samples, const void* of_queries, const void* of_keys, double kept) const {
    const auto places = [](const void* at, const std::int64_t(&four)[4]) {
      return Places{static_cast<const std::int64_t*>(at), four[0], four[1], four[2], four[3]};
    };
    return {static_cast<const std::int64_t*>(of_samples), key_row, head_offset, places(of_queries, query_places),
            places(of_keys, key_places), static_cast<std::int32_t>(threshold), static_cast<float>(kept)};
  }

  template <typename T>
  Operands<T> operands(const void* of_q, const void* of_k, const void* of_v, double scale) const {
    const auto tensor = [](const void* at, const std::int64_t(&strides)[3]) {
      return HeadTensor<const T>{static_cast<const T*>(at), static_cast<int>(strides[0]), strides[1], strides[2]};
    };
    return {tensor(of_q, q), tensor(of_k, k), tensor(of_v, v), static_cast<int>(heads / groups), static_cast<int>(shares),
            static_cast<int>(size), static_cast<float>(scale)};
  }

  // A contiguous tensor [rows, samples, count, size].
  template <typename T>
  HeadTensor<T> whole(const void* at, std::int64_t count) const {
    return {static_cast<T*>(const_cast<void*>(at)), static_cast<int>(samples * count * size), count * size, size};
  }

  // The same as a result.
  template <typename T>
  Written<T> written(void* at, std::int64_t count, std::int64_t side) const {
    return wide & side ? Written<T>{{}, whole<float>(at, count)} : Written<T>{whole<T>(at, count), {}};
  }
};

}  // namespace megazero::attention

using megazero::attention::Numbers;

extern "C" int megazero_cuda_attention_forward(std::int64_t dtype, const std::int64_t* numbers, double scale,
                                               const void* q, const void* k, const void* v, const void* first,
                                               const void* stop, const void* mask, const void* keys,
                                               const void* query_places, const void* key_places, double kept, void* out,
                                               float* lse, void* stream) {
  using namespace megazero::attention;
  const auto& n = *reinterpret_cast<const Numbers*>(numbers);
  if (!n.fit()) return megazero::kInvalidValue;
  return with_tile(dtype, n.size, [&](auto element, auto channels) {
    using T = decltype(element);
    constexpr int D = decltype(channels)::value;
    using Sizes = Shape<T, D>;
    const dim3 blocks(megazero::ceil_div(n.queries, Sizes::kOwn), n.heads, n.samples);
    const int bytes = kMemory<T, D>;
    return MEGAZERO_LAUNCH((attention_forward<T, D>), blocks, dim3(Sizes::kWarps * megazero::kWarp), bytes, stream,
                           n.operands<T>(q, k, v, scale), n.visible(first, stop, mask),
                           n.drops(keys, query_places, key_places, kept), n.written<T>(out, n.heads, 1), lse);
  });
}
MEGAZERO_EXPORT(attention_forward)

extern "C" int megazero_cuda_attention_backward(std::int64_t dtype, const std::int64_t* numbers, double scale,
                                                const void* q, const void* k, const void* v, const void* first,
                                                const void* stop, const void* mask, const void* keys,
                                                const void* query_places, const void* key_places, double kept,
                                                const void* out, const void* grad, const float* lse,
                                                const float* grad_lse, float* delta, void* grad_q, void* grad_k,
                                                void* grad_v, void* stream) {
  using namespace megazero::attention;
  const auto& n = *reinterpret_cast<const Numbers*>(numbers);
  if (!n.fit()) return megazero::kInvalidValue;
  return with_tile(dtype, n.size, [&](auto element, auto channels) {
    using T = decltype(element);
    constexpr int D = decltype(channels)::value;
    using Sizes = Shape<T, D>;
    const dim3 threads(Sizes::kWarps * megazero::kWarp);
    const int bytes = kMemory<T, D>;
    const Operands<T> in = n.operands<T>(q, k, v, scale);
    const Visible visible = n.visible(first, stop, mask);
    const Drops drops = n.drops(keys, query_places, key_places, kept);
    const auto grads = n.whole<const T>(grad, n.heads);
    const int code = MEGAZERO_LAUNCH((attention_backward_queries<T, D>),
                                     dim3(megazero::ceil_div(n.queries, Sizes::kOwn), n.heads, n.samples), threads,
                                     bytes, stream, in, visible, drops, n.whole<const T>(out, n.heads), grads, lse,
                                     grad_lse, delta, n.written<T>(grad_q, n.heads, 1));
    if (code != 0) return code;
    return MEGAZERO_LAUNCH((attention_backward_keys<T, D>),
                           dim3(megazero::ceil_div(n.keys, Sizes::kOwn), n.groups * n.shares, n.samples), threads, bytes,
                           stream, in, visible, drops, grads, lse, delta, n.written<T>(grad_k, n.groups * n.shares, 2),
                           n.written<T>(grad_v, n.groups * n.shares, 2));
  });
}
MEGAZERO_EXPORT(attention_backward)
