// The optimizers that move each element by itself: a struct for each, whose fields are the coefficients that Python
// gives (`coefficients` in megazero/optim/elementwise.py) and whose call moves one element p of the masters by its
// gradient g and brings its state up to date.
//
// The formulas are in words that common/update.hpp has for CPUs and common/cuda_update.hpp for GPUs, one of which is
// included before this. A formula does not read back what it has written: on a CPU that costs a fifth of the pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace megazero {

// AdamW (Loshchilov & Hutter 2019; moments of Kingma & Ba 2015), with the corrections of both moments in rate and eps:
// m = m + (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, p = decay p - rate m / (sqrt(v) + eps).
struct Adam {
  float mean_share, keep, square_share, rate, eps, decay;

  MEGAZERO_RULE void operator()(float& p, float g, float& m, float& v) const {
    const float mean = moved_towards(m, g, mean_share);
    const float square = sum_rounding_first(keep, v, square_share * g, g);
    m = mean;
    v = square;
    p = sum_rounding_first(decay, p, -rate, over_root(mean, square, eps));
  }
};

// SGD with heavy-ball momentum (Polyak 1964), or without, and with weight decay as a part of the gradient:
// u = momentum u + g + decay p, p = p - lr u.
struct Sgd {
  float lr, momentum, decay;

  MEGAZERO_RULE void operator()(float& p, float g) const { p = fused(-lr, decayed_gradient(g, p, decay), p); }

  MEGAZERO_RULE void operator()(float& p, float g, float& u) const {
    const float direction = fused(momentum, u, decayed_gradient(g, p, decay));
    u = direction;
    p = fused(-lr, direction, p);
  }
};

// Lion (Chen et al. 2023, algorithm 2): p = decay p - lr sign(beta1 m + (1 - beta1) g), m = beta2 m + (1 - beta2) g.
struct Lion {
  float beta1, share, mean_share, lr, decay;

  MEGAZERO_RULE void operator()(float& p, float g, float& m) const {
    const float direction = sum_rounding_second(beta1, m, share, g);
    m = moved_towards(m, g, mean_share);
    // NaN has no sign, as in torch.
    const float move = direction > 0.0f ? lr : (direction < 0.0f ? -lr : 0.0f);
    p = sum_rounding_first(decay, p, -1.0f, move);
  }
};

// Adagrad (Duchi et al. 2011), with weight decay as a part of the gradient:
// sum = sum + g^2, p = p - lr g / (sqrt(sum) + eps).
struct Adagrad {
  float lr, eps, decay;

  MEGAZERO_RULE void operator()(float& p, float gradient, float& sum) const {
    const float g = decayed_gradient(gradient, p, decay);
    const float total = fused(g, g, sum);
    sum = total;
    p = fused(-lr, over_root(g, total, eps), p);
  }
};

// use(name, Rule) for every rule.
#define MEGAZERO_RULES(use) use(adam, Adam) use(sgd, Sgd) use(lion, Lion) use(adagrad, Adagrad)

// The rule with these coefficients, one for each of its fields.
template <typename Rule>
Rule rule_of(const double* coefficients) {
  constexpr std::size_t count = sizeof(Rule) / sizeof(float);
  float fields[count];
  std::transform(coefficients, coefficients + count, fields, [](double number) { return static_cast<float>(number); });
  Rule rule;
  std::memcpy(&rule, fields, sizeof(Rule));
  return rule;
}

// Calls start(kinds) with the number of a rule's kinds of states as a constant; false if it takes another number.
template <typename Rule, typename Start>
bool with_kinds(std::int64_t kinds, const Start& start) {
  bool taken = false;
  const auto attempt = [&](auto number, auto takes) {
    if constexpr (decltype(takes)::value) {
      if (kinds == number) {
        start(number);
        taken = true;
      }
    }
  };
  using F = float&;
  attempt(std::integral_constant<int, 0>{}, std::is_invocable<const Rule&, F, float>{});
  attempt(std::integral_constant<int, 1>{}, std::is_invocable<const Rule&, F, float, F>{});
  attempt(std::integral_constant<int, 2>{}, std::is_invocable<const Rule&, F, float, F, F>{});
  return taken;
}

}  // namespace megazero
