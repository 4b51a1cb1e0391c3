"""rules: the cross-field rules that a configuration must keep.

`rule.py` says what a rule is, `table.py` lists and checks all of them; the other files hold them by subject.
"""

from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.rules.table import RULES, broken_rules, check

__all__ = ["RULES", "Case", "Rule", "broken_rules", "check", "value_at"]
