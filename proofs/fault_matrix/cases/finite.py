"""A weight or a moment becomes NaN or inf; nothing of that may be saved."""

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
    AfterUpdate,
    Poisoned,
)
from proofs.fault_matrix.runs import Setting, train


def states_that_are_not_finite() -> list[FaultCase]:
    """A weight or a moment becomes NaN or inf; nothing of that may be saved."""
    found = []
    for number, (where, kind, value) in enumerate(
        [
            (Setting.of(dp=2, stage=1), "exp_avg", NAN),
            (Setting.of(dp=2, stage=3), "exp_avg_sq", float("inf")),
            (Setting.of(tp=2), "exp_avg", float("inf")),
            (Setting.of(pp=2), "exp_avg", NAN),
            (Setting.of(dp=2, stage=2, dtype="bf16"), "exp_avg", NAN),
        ]
    ):
        name = "final_norm.weight" if where.grid.pp == 2 or where.grid.dp == 2 else "up.weight"
        flags = BASE.replace("--train-iters 36", "--train-iters 30") + "--check-weights-interval 0"
        spoil = AfterUpdate(30, Poisoned(name, kind, value))
        found.append(
            FaultCase(
                "finite",
                f"{kind} of {name} becomes {value} before a save, {where.name}",
                lambda folder, where=where, flags=flags, spoil=spoil: train(
                    where, folder, flags, spoils={1: spoil}
                ),
                Expected(1, (rf"must be finite to be saved, but rank 1 .* {kind}|{kind}.*rank 1",), (10, 20)),
                quick=number == 0,
            )
        )
    for where in (Setting.of(dp=2), Setting.of(tp=2, dtype="bf16")):
        spoil = AfterUpdate(STEP, Poisoned("down.weight", "weight"))
        found.append(
            FaultCase(
                "finite",
                f"a weight becomes NaN on rank 1, {where.name}",
                lambda folder, where=where, spoil=spoil: train(
                    where, folder, BASE + "--check-weights-interval 0 --train-iters 40", spoils={1: spoil}
                ),
                Expected(1, (r"a number is inf or NaN", r"`max_skipped_updates` is reached: "), KEPT),
            )
        )
    return found
