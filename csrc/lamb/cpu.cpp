#include "lamb/cpu.hpp"

#include <cmath>

namespace megazero {
namespace {

struct UpdateTerms {
  float factor;
  float eps;
  float decay;
};

MEGAZERO_INLINE float update(float p, float m, float v, const UpdateTerms& terms) {
  return terms.factor * (m / (std::sqrt(v) + terms.eps)) + terms.decay * p;
}

MEGAZERO_CLONES void measure(UpdatePass pass, std::int64_t begin, std::int64_t end, const float* p, float* m, float* v,
                             double* sums, float mean_share, float keep, float square_share, UpdateTerms terms) {
  alignas(64) float grads[kUpdateBlock];
  double weight = 0.0;
  double moved = 0.0;
  for (std::int64_t at = begin; at < end; at += kUpdateBlock) {
    const std::int64_t count = std::min(kUpdateBlock, end - at);
    read_gradients(pass, at, count, grads);
#pragma omp simd reduction(+ : weight, moved)
    for (std::int64_t i = 0; i < count; ++i) {
      const float g = grads[i];
      const float mean = m[at + i] + mean_share * (g - m[at + i]);
      const float square = keep * v[at + i] + square_share * g * g;
      m[at + i] = mean;
      v[at + i] = square;
      // In double: squares neither overflow, nor does a long sum lose its small terms.
      const double u = update(p[at + i], mean, square, terms);
      const double w = p[at + i];
      weight += w * w;
      moved += u * u;
    }
  }
  sums[0] = weight;
  sums[1] = moved;
}

MEGAZERO_CLONES void move(UpdatePass pass, std::int64_t begin, std::int64_t end, float* p, const float* m,
                          const float* v, float rate, UpdateTerms terms) {
  std::int64_t count = first_block(pass, begin);
  for (std::int64_t at = begin; at < end; at += count, count = kUpdateBlock) {
    count = std::min(count, end - at);
#pragma omp simd
    for (std::int64_t i = at; i < at + count; ++i) {
      p[i] -= rate * update(p[i], m[i], v[i], terms);
    }
    write_weights(pass, p + at, at, count);
  }
  finish_writes();
}

UpdateTerms terms_of(double factor, double eps, double decay) {
  return {static_cast<float>(factor), static_cast<float>(eps), static_cast<float>(decay)};
}

}  // namespace
}  // namespace megazero

void megazero_lamb_norms(megazero::UpdatePass pass, const float* p, float* m, float* v, double* sums,
                         std::int64_t block, double beta1, double beta2, double factor, double eps, double decay) {
  const megazero::UpdateTerms terms = megazero::terms_of(factor, eps, decay);
  // Blocks, not threads, own sums: the norms do not depend on the number of threads.
  const std::int64_t blocks = (pass.count + block - 1) / block;
  const int workers = megazero::workers_for(blocks, block, pass.threads);
  megazero::parallel_for(blocks, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t number = begin; number < end; ++number) {
      const std::int64_t at = number * block;
      megazero::measure(pass, at, std::min(at + block, pass.count), p, m, v, sums + 2 * number,
                        static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2),
                        terms);
    }
  });
}

void megazero_lamb_move(megazero::UpdatePass pass, float* p, const float* m, const float* v, double rate,
                        double factor, double eps, double decay) {
  const megazero::UpdateTerms terms = megazero::terms_of(factor, eps, decay);
  const int workers = megazero::workers_for(pass.count, 1, pass.threads);
  megazero::parallel_for(pass.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    megazero::move(pass, begin, end, p, m, v, static_cast<float>(rate), terms);
  });
}
