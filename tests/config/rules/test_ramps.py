"""Curricula that outlast the training are accepted, and a line of the log says so."""

from __future__ import annotations

from typing import Any

from megazero.config.resolve import parse_config
from megazero.config.rules.notes import cut_short
from megazero.config.rules.rule import Case
from megazero.config.rules.table import check
from tests.config.rules.examples import DROPS, METRIC, RAMP, TASK, WORLD, metric
from tests.config.samples import BASE_FLAGS, make_config
from tests.tables import over_table

LONG_RAMP = {**RAMP, "curriculum.seqlen_total_curriculum_step": 1000}
LONG_DROPS = {**DROPS, "skipping.random_ltd_require_steps": 1000}


@over_table(
    ("changes", "line"),
    [
        (
            LONG_RAMP,
            "the training ends after 100 iterations, before the sequence length of `seqlen_schedule` stops "
            "growing at LAST.",
        ),
        (
            metric(total_curriculum_step=101),
            f"the training ends after 100 iterations, before the curriculum of `{METRIC['name']}` gets to "
            "its end at LAST.",
        ),
        (
            LONG_DROPS,
            "the training ends after 100 iterations, before layers with `random_ltd` see all tokens at LAST.",
        ),
    ],
)
def test_a_ramp_that_is_cut_short_is_named(changes: dict[str, Any], line: str) -> None:
    config = make_config(changes)
    assert check(config, WORLD) == []
    (said,) = cut_short(Case(config, WORLD))
    start, end = line.split("LAST")
    assert said.startswith(start)
    assert said.endswith(end)
    assert int(said.removeprefix(start).removesuffix(end)) >= 100


@over_table("changes", [{}, RAMP, metric(), DROPS])
def test_a_ramp_that_gets_to_its_end_is_not(changes: dict[str, Any]) -> None:
    assert cut_short(Case(make_config(changes), WORLD)) == []


def test_nothing_is_said_while_the_length_is_unknown() -> None:
    assert cut_short(Case(make_config(LONG_RAMP))) == []
    assert cut_short(Case(make_config({**LONG_DROPS, **TASK, "training.train_iters": None}), 1)) == []


def test_a_run_says_it() -> None:
    flags = "--seqlen-schedule fixed_linear --seqlen-min-difficulty 8 --seqlen-total-curriculum-step 1000"
    (line,) = parse_config([*BASE_FLAGS, *flags.split()], world_size=1).warnings
    assert line.startswith("the training ends after 100 iterations, before the sequence length")
