"""Tokens that are not what they were: when the dataset was made, the run began, or it was saved."""

from __future__ import annotations

import os
from pathlib import Path

from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    STEP,
    Expected,
    FaultCase,
    damage,
    first_error,
)
from proofs.fault_matrix.faults import (
    AfterUpdate,
)
from proofs.fault_matrix.runs import Outcome, Setting, train, write_text


def data_that_changes() -> list[FaultCase]:
    """Tokens that are not what they were: when the dataset was made, the run began, or it was saved."""

    def flipped(folder: Path) -> Outcome:
        damage(Path(write_text(folder.parent / "text")).with_suffix(".bin"), 1)
        return train(Setting.of(dp=2), folder, BASE)

    def cut(folder: Path) -> Outcome:
        path = Path(write_text(folder.parent / "text")).with_suffix(".bin")
        spoil = AfterUpdate(STEP, lambda engine: os.truncate(path, 100))
        return train(Setting.of(dp=2), folder, BASE, spoils={1: spoil})

    def written(folder: Path) -> Outcome:
        path = Path(write_text(folder.parent / "text")).with_suffix(".bin")
        spoil = AfterUpdate(STEP, lambda engine: os.utime(path))
        return train(Setting.of(tp=2), folder, BASE, spoils={1: spoil})

    def resumed(folder: Path) -> Outcome:
        prefix = write_text(folder.parent / "text")
        first = train(Setting.of(dp=2), folder, BASE.replace("--train-iters 36", "--train-iters 30"))
        assert first.status == 0, first_error(first)
        for suffix in (".bin", ".idx", ".sum"):
            Path(prefix).with_suffix(suffix).unlink()
        write_text(folder.parent / "text", 44_000)
        return train(Setting.of(dp=2), folder, f"{BASE} --load {folder}")

    return [
        FaultCase(
            "data", "a bit of a token flips, D2", flipped, Expected(1, (r"text.bin` must have CRC-32",)), True
        ),
        FaultCase(
            "data", "tokens are cut off under the run, D2", cut, Expected(1, (r"text\.bin",), KEPT), True
        ),
        FaultCase(
            "data",
            "tokens are written to under the run, T2",
            written,
            Expected(1, (r"rank \d sees: .*text\.bin was written to",), KEPT),
        ),
        FaultCase(
            "data",
            "tokens change before a resume, D2",
            resumed,
            Expected(1, (r"text\.bin.* must hold what the checkpoint was trained on",), KEPT),
            True,
        ),
    ]
