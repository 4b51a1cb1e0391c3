#include "lamb/cpu.hpp"

#include <cmath>

#include "common/clones.hpp"

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

MEGAZERO_CLONES void measure(const float* p, const float* g, float* m, float* v, double* sums, std::int64_t count,
                             float mean_share, float keep, float square_share, UpdateTerms terms) {
  double weight = 0.0;
  double moved = 0.0;
#pragma omp simd reduction(+ : weight, moved)
  for (std::int64_t i = 0; i < count; ++i) {
    const float mean = m[i] + mean_share * (g[i] - m[i]);
    const float square = keep * v[i] + square_share * g[i] * g[i];
    m[i] = mean;
    v[i] = square;
    // In double: squares neither overflow, nor does a long sum lose its small terms.
    const double u = update(p[i], mean, square, terms);
    const double w = p[i];
    weight += w * w;
    moved += u * u;
  }
  sums[0] = weight;
  sums[1] = moved;
}

MEGAZERO_CLONES void move(float* p, const float* m, const float* v, std::int64_t count, float rate,
                          UpdateTerms terms) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    p[i] -= rate * update(p[i], m[i], v[i], terms);
  }
}

UpdateTerms terms_of(double factor, double eps, double decay) {
  return {static_cast<float>(factor), static_cast<float>(eps), static_cast<float>(decay)};
}

}  // namespace
}  // namespace megazero

void megazero_lamb_norms(megazero::Rows rows, const float* p, const float* g, float* m, float* v, double* sums,
                         std::int64_t block, double beta1, double beta2, double factor, double eps, double decay) {
  const megazero::UpdateTerms terms = megazero::terms_of(factor, eps, decay);
  // Blocks, not threads, own sums: the norms do not depend on the number of threads.
  const std::int64_t blocks = (rows.count + block - 1) / block;
  const int workers = megazero::workers_for(blocks, block, rows.threads);
  megazero::parallel_for(blocks, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t number = begin; number < end; ++number) {
      const std::int64_t at = number * block;
      megazero::measure(p + at, g + at, m + at, v + at, sums + 2 * number, std::min(block, rows.count - at),
                        static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2),
                        terms);
    }
  });
}

void megazero_lamb_move(megazero::Rows rows, float* p, const float* m, const float* v, double rate, double factor,
                        double eps, double decay) {
  const megazero::UpdateTerms terms = megazero::terms_of(factor, eps, decay);
  const int workers = megazero::workers_for(rows.count, 1, rows.threads);
  megazero::parallel_for(rows.count, workers, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    megazero::move(p + begin, m + begin, v + begin, end - begin, static_cast<float>(rate), terms);
  });
}
