#include "adam/cpu.hpp"

#include <cmath>

namespace megazero {
namespace {

struct AdamRule {
  float mean_share;
  float keep;
  float square_share;
  float rate;
  float eps;
  float decay;

  MEGAZERO_INLINE void operator()(float& p, float g, float& m, float& v) const {
    const float mean = m + mean_share * (g - m);
    const float square = keep * v + square_share * g * g;
    m = mean;
    v = square;
    p = decay * p - rate * (mean / (std::sqrt(square) + eps));
  }
};

}  // namespace
}  // namespace megazero

void megazero_adam_step(megazero::UpdatePass pass, float* p, float* m, float* v, double beta1, double beta2,
                        double rate, double eps, double decay) {
  const megazero::AdamRule rule{static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
                                static_cast<float>(1.0 - beta2), static_cast<float>(rate),
                                static_cast<float>(eps),         static_cast<float>(decay)};
  megazero::update_all(pass, rule, p, m, v);
}
