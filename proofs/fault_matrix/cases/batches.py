"""A batch of noise among the data."""

from __future__ import annotations

from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    NOISE,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.runs import Setting, train


def batches_that_are_noise() -> list[FaultCase]:
    """A batch of noise among the data."""
    found = []
    rows = [
        ("warn", Setting.of(dp=2), "none"),
        ("skip", Setting.of(dp=2), "skipped"),
        ("rollback", Setting.of(dp=2), "rolled back"),
        ("rollback", Setting.of(tp=2), "rolled back"),
        ("rollback", Setting.of(pp=2), "rolled back"),
        ("rollback", Setting.of(dp=2, stage=3, dtype="bf16"), "rolled back"),
        ("skip", Setting.of(tp=2, pp=2), "skipped"),
        ("skip", Setting.of(dp=2, stage=2, dtype="fp16"), "skipped"),
        ("warn", Setting.of(dp=3, stage=1, dtype="bf16"), "none"),
    ]
    for number, (choice, where, action) in enumerate(rows):
        found.append(
            FaultCase(
                "batches",
                f"a batch of noise with --on-spike {choice}, {where.name}",
                lambda folder, where=where, choice=choice: train(
                    where, folder, f"{BASE} --on-spike {choice}", noise=NOISE
                ),
                Expected(0, (r"loss \S+, where \S+ is usual",), KEPT, ("spike",), (action,)),
                quick=number in (1, 2),
            )
        )
    found.append(
        FaultCase(
            "batches",
            "noise without end with --on-spike rollback, D2",
            lambda folder: train(
                Setting.of(dp=2),
                folder,
                f"{BASE} --on-spike rollback --max-rollbacks 2",
                noise=range(NOISE.start, 12 * 36),
            ),
            Expected(
                1,
                (r"`max_rollbacks` to the checkpoint of iteration 30, 2, did not help",),
                KEPT,
                ("spike",) * 3,
                ("rolled back", "rolled back", "stopped"),
            ),
        )
    )
    return found
