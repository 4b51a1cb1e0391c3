#include "lion/cpu.hpp"

namespace megazero {
namespace {

struct LionRule {
  float beta1;
  float share;
  float mean_share;
  float lr;
  float decay;

  MEGAZERO_INLINE void operator()(float& p, float g, float& m) const {
    const float direction = beta1 * m + share * g;
    m = m + mean_share * (g - m);
    // NaN has no sign, as in torch.
    const float step = direction > 0.0f ? lr : (direction < 0.0f ? -lr : 0.0f);
    p = decay * p - step;
  }
};

}  // namespace
}  // namespace megazero

void megazero_lion_step(megazero::UpdatePass pass, float* p, float* m, double beta1, double beta2, double lr,
                        double decay) {
  const megazero::LionRule rule{static_cast<float>(beta1), static_cast<float>(1.0 - beta1),
                                static_cast<float>(1.0 - beta2), static_cast<float>(lr), static_cast<float>(decay)};
  megazero::update_all(pass, rule, p, m);
}
