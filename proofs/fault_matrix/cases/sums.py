"""What one rank brings to a sum over ranks is changed on the way."""

from __future__ import annotations

from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    STEP,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.runs import Setting, train


def sums_that_are_wrong() -> list[FaultCase]:
    """What one rank brings to a sum over ranks is changed on the way."""
    found = []
    for where, operation, axis, each in (
        (Setting.of(dp=2), "all_reduce", "replica", 1),
        (Setting.of(dp=3), "all_reduce", "replica", 1),
        (Setting.of(dp=2, stage=1), "reduce_scatter", "replica", 1),
        (Setting.of(dp=2, stage=2), "reduce_scatter", "replica", 3),
    ):
        group = (1, axis, operation, each * (STEP - 1) + 1, lambda tensor: tensor.mul_(1e4), 2000)
        found.append(
            FaultCase(
                "sums",
                f"what rank 1 brings to {operation} is changed once, {where.name}",
                lambda folder, where=where, group=group: train(
                    where, folder, BASE + "--rerun-on-fault", group=group
                ),
                Expected(
                    0,
                    (r"the sums over the ranks came out differently: the network or a buffer failed once",),
                    KEPT,
                    ("fault",),
                    ("went on",),
                ),
                quick=where.grid.dp == 3,
            )
        )
    return found
