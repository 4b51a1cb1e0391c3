#include "sgd/cpu.hpp"

namespace megazero {
namespace {

struct SgdRule {
  float lr;
  float momentum;
  float decay;

  MEGAZERO_INLINE float gradient(float p, float g) const { return decay != 0.0f ? g + decay * p : g; }

  MEGAZERO_INLINE void operator()(float& p, float g) const { p = p - lr * gradient(p, g); }

  MEGAZERO_INLINE void operator()(float& p, float g, float& u) const {
    const float direction = momentum * u + gradient(p, g);
    u = direction;
    p = p - lr * direction;
  }
};

}  // namespace
}  // namespace megazero

void megazero_sgd_step(megazero::UpdatePass pass, float* p, float* u, double lr, double momentum, double decay) {
  const megazero::SgdRule rule{static_cast<float>(lr), static_cast<float>(momentum), static_cast<float>(decay)};
  if (u == nullptr) {
    megazero::update_all(pass, rule, p);
  } else {
    megazero::update_all(pass, rule, p, u);
  }
}
