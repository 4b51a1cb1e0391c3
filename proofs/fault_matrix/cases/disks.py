"""A disk is full for a while."""

from __future__ import annotations

from proofs.fault_matrix.cases.case import (
    BASE,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.faults import (
    FullDisk,
)
from proofs.fault_matrix.runs import Setting, train


def disks_that_fail() -> list[FaultCase]:
    """A disk is full for a while."""
    found = []
    for where, rank, flags in (
        (Setting.of(dp=2), 0, ""),
        (Setting.of(dp=2, stage=1), 1, ""),
        (Setting.of(pp=2), 1, ""),
        (Setting.of(dp=2, stage=3), 1, "--async-save"),
    ):
        found.append(
            FaultCase(
                "disks",
                f"the disk of rank {rank} is full for one checkpoint, {where.name} {flags}".rstrip(),
                lambda folder, where=where, rank=rank, flags=flags: train(
                    where, folder, BASE + flags, disks={rank: FullDisk(2, 1)}
                ),
                Expected(0, (rf"rank {rank} could not .*No space left",), (30, 36), ()),
                quick=where.grid.pp == 2,
            )
        )
    return found
