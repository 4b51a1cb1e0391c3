"""A rank computes a wrong gradient, once or for good."""

from __future__ import annotations

from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    NAN,
    STEP,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.faults import (
    BadGradient,
    Spoil,
)
from proofs.fault_matrix.runs import Setting, train

RERUN = BASE + "--rerun-on-fault "
UP, NORM = "layers.0.mlp.up.weight", "final_norm.weight"
HUGE = 2.0**20


def gradients_that_are_wrong() -> list[FaultCase]:
    """A rank computes a wrong gradient, once or for good."""
    return [*_once(), *_for_good(), *_not_repeated()]


def _once() -> list[FaultCase]:
    """The step's result the second time is used, and the rank is named."""
    rows = [
        (Setting.of(dp=2), 3, HUGE),
        (Setting.of(dp=3), 2, NAN),
        (Setting.of(dp=2, stage=1, dtype="bf16"), 3, NAN),
        (Setting.of(dp=2, stage=2), 3, HUGE),
        (Setting.of(dp=2, stage=3), 3, NAN),
        (Setting.of(tp=2), 6, HUGE),
        (Setting.of(pp=2), 6, NAN),
        (Setting.of(tp=2, dp=2), 3, NAN),
    ]
    found = []
    for number, (where, backwards, factor) in enumerate(rows):
        told = r"rank 1 computed something else the second time"
        if where.grid.tp == 2 or where.grid.pp == 2:
            told = r"ranks? .*1.* computed something else the second time"
        expected = Expected(0, (told,), KEPT, ("fault",), ("went on",))
        what = f"a gradient wrong once ({factor:g})"
        found.append(_spoilt(what, where, RERUN, _bad(where, backwards, 1, factor), expected, number < 2))
    return found


def _for_good() -> list[FaultCase]:
    """The run stops, and names the rank that computes something else than another does with its batch."""
    few = RERUN.replace("--global-batch-size 12", "--global-batch-size 8")
    expected = Expected(
        1, (r"rank 1 computes something else than other ranks",), KEPT, ("fault",), ("stopped",)
    )
    return [
        _spoilt(
            f"a gradient wrong for good ({factor:g})",
            where,
            flags,
            _bad(where, backwards, None, factor),
            expected,
            quick=number == 0,
        )
        for number, (where, flags, backwards, factor) in enumerate(
            [
                (Setting.of(dp=3), RERUN, 2, HUGE),
                (Setting.of(dp=4), few, 1, NAN),
                (Setting.of(dp=3, stage=2, dtype="bf16"), RERUN, 2, HUGE),
                (Setting.of(dp=3, stage=3), RERUN, 2, NAN),
            ]
        )
    ]


def _not_repeated() -> list[FaultCase]:
    """NaN from one step on: updates are skipped, and the run stops after a row of them."""
    found = []
    for where, backwards, quick in (
        (Setting.of(dp=2), 3, True),
        (Setting.of(dp=2, dtype="bf16"), 3, False),
        (Setting.of(pp=2), 6, False),
    ):
        spoil = _bad(where, backwards, None, NAN)
        expected = Expected(
            1,
            (
                r"`max_skipped_updates` is reached: 5 updates in a row were skipped up to iteration 35",
                spoil.name.split(".")[-2],
            ),
            KEPT,
            ("not finite", "row of skipped updates"),
            ("skipped", "stopped"),
        )
        what = "NaN in a gradient from now on, nothing repeated"
        found.append(_spoilt(what, where, BASE, spoil, expected, quick))
    return found


def _bad(where: Setting, backwards: int, times: int | None, factor: float) -> BadGradient:
    """A gradient of rank 1 from `STEP` on, given the backward passes of a step there."""
    return BadGradient(NORM if where.grid.pp == 2 else UP, backwards * (STEP - 1) + 1, times, factor)


def _spoilt(
    what: str, where: Setting, flags: str, spoil: Spoil, expected: Expected, quick: bool
) -> FaultCase:
    return FaultCase(
        "gradients",
        f"{what} on rank 1, {where.name}",
        lambda folder: train(where, folder, flags, spoils={1: spoil}),
        expected,
        quick,
    )
