"""A rank takes longer than the others, stops, or dies."""

from __future__ import annotations

import signal

from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.faults import (
    Slow,
)
from proofs.fault_matrix.runs import Setting, run_processes, train


def ranks_that_are_slow_or_gone() -> list[FaultCase]:
    """A rank takes longer than the others, stops, or dies."""
    slow = (r"slow rank: rank 1 takes \S+ times its peers' time",)
    flags = BASE + "--straggler-interval 5 --heartbeat-timeout-minutes 0.05"
    long = flags.replace("--train-iters 36", "--train-iters 100000")
    found = [
        FaultCase(
            "ranks",
            f"rank 1 is slow, {where.name}",
            lambda folder, where=where: train(where, folder, flags, spoils={1: Slow(0.1)}, watched=True),
            Expected(0, slow, KEPT, ("slow rank",), ("none",)),
            where.grid.dp == 2,
        )
        for where in (Setting.of(dp=2), Setting.of(dp=2, stage=2))
    ]
    for name, number, rank, told in (
        ("dies", signal.SIGKILL, 1, r"rank 1 .*(gone|reset|closed)"),
        ("is stopped", signal.SIGSTOP, 1, r"rank 1 .*no sign of life"),
        ("which keeps the store, is stopped", signal.SIGSTOP, 0, r"rank 0 .*which keeps the job's key-value"),
    ):
        found.append(
            FaultCase(
                "ranks",
                f"rank {rank}, of three processes, {name}",
                lambda folder, number=number, rank=rank: run_processes(folder, 3, long, [(number, rank)]),
                Expected(1, (told, r"the job has failed"), (10, 20)),
            )
        )
    return found
