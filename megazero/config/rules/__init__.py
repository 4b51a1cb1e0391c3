"""rules: the cross-field rules that a configuration must keep.

`rule.py` says what a rule is, `table.py` lists and checks all of them; `notes.py` says which settings are
accepted without effect; the other files hold the rules by subject.
"""

from megazero.config.rules.notes import NOTES, Note, notes_on
from megazero.config.rules.ramps import cut_short
from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.rules.table import RULES, broken_rules, check, check_sections

__all__ = [
    "NOTES",
    "RULES",
    "Case",
    "Note",
    "Rule",
    "broken_rules",
    "check",
    "check_sections",
    "cut_short",
    "notes_on",
    "value_at",
]
