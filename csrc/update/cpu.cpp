#include "update/cpu.hpp"

#include "update/rules.hpp"

namespace megazero {
namespace {

template <typename Rule>
bool update_by(const UpdatePass& pass, float* p, std::int64_t kinds, float* const* states, std::int64_t count,
               const double* coefficients) {
  if (count != sizeof(Rule) / sizeof(float)) return false;
  const Rule rule = rule_of<Rule>(coefficients);
  return with_kinds<Rule>(kinds, [&](auto number) {
    if constexpr (number == 0) {
      update_all(pass, rule, p);
    } else if constexpr (number == 1) {
      update_all(pass, rule, p, states[0]);
    } else {
      update_all(pass, rule, p, states[0], states[1]);
    }
  });
}

}  // namespace
}  // namespace megazero

bool megazero_update(const char* rule, megazero::UpdatePass pass, float* p, std::int64_t kinds, float* const* states,
                     std::int64_t count, const double* coefficients) {
#define MEGAZERO_BY(name, Rule)        \
  if (std::strcmp(rule, #name) == 0) { \
    return megazero::update_by<megazero::Rule>(pass, p, kinds, states, count, coefficients); \
  }
  MEGAZERO_RULES(MEGAZERO_BY)
  return false;
}
