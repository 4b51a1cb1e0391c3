from __future__ import annotations

import dataclasses

import pytest

from megazero.errors import ConfigError
from megazero.loss import LossTerm
from tests.tables import over_table


@over_table(
    ("term", "label", "trained"),
    [
        (LossTerm("lm"), "lm loss", True),
        (LossTerm("router_z", 1e-3), "router_z loss", True),
        (LossTerm("accuracy", 0.0), "accuracy", False),
    ],
)
def test_what_is_only_reported_keeps_its_bare_name(term, label, trained):
    assert (term.label, term.trained) == (label, trained)


def test_a_term_is_a_value():
    assert LossTerm("lm") == LossTerm("lm", 1.0) != LossTerm("lm", 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossTerm("lm").coefficient = 2.0


@over_table("name", ["total", "", "two words", "a/b", "1st"])
def test_names_that_metrics_could_not_hold_are_refused(name):
    with pytest.raises(ConfigError, match="`name` of a loss term must be an identifier other than total"):
        LossTerm(name)
