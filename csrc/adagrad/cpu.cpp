#include "adagrad/cpu.hpp"

#include <cmath>

namespace megazero {
namespace {

struct AdagradRule {
  float lr;
  float eps;
  float decay;

  MEGAZERO_INLINE void operator()(float& p, float g, float& sum) const {
    const float gradient = decay != 0.0f ? g + decay * p : g;
    const float total = sum + gradient * gradient;
    sum = total;
    p = p - lr * (gradient / (std::sqrt(total) + eps));
  }
};

}  // namespace
}  // namespace megazero

void megazero_adagrad_step(megazero::UpdatePass pass, float* p, float* sum, double lr, double eps, double decay) {
  const megazero::AdagradRule rule{static_cast<float>(lr), static_cast<float>(eps), static_cast<float>(decay)};
  megazero::update_all(pass, rule, p, sum);
}
