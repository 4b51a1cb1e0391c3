"""The newest checkpoint is damaged, or its run was not healthy: the one before is resumed from."""

from __future__ import annotations

from pathlib import Path

from megazero.checkpoint.folder import iteration_folder
from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    Expected,
    FaultCase,
    damage,
    first_error,
)
from proofs.fault_matrix.runs import Outcome, Setting, train


def checkpoints_that_are_bad() -> list[FaultCase]:
    """The newest checkpoint is damaged, or its run was not healthy: the one before is resumed from."""

    def damaged(folder: Path, where: Setting) -> Outcome:
        first = train(where, folder, BASE.replace("--train-iters 36", "--train-iters 30"))
        assert first.status == 0, first_error(first)
        path = next(iteration_folder(folder, 30).glob("*.safetensors"))
        damage(path, path.stat().st_size - 5)
        return train(where, folder, f"{BASE} --load {folder}")

    def unhealthy(folder: Path, where: Setting) -> Outcome:
        noise = range(12 * 28, 12 * 29)  # a spike at step 29 is not over at the checkpoint of step 30
        first = train(where, folder, BASE.replace("--train-iters 36", "--train-iters 30"), noise=noise)
        assert first.saved == KEPT, first.saved
        return train(where, folder, f"{BASE} --load {folder}", noise=noise)

    return [
        FaultCase(
            "checkpoints",
            f"the newest is damaged, {where.name}",
            lambda folder, where=where: damaged(folder, where),
            Expected(0, (r"passed over .*iter_0000030", r"loaded .*iter_0000020"), KEPT),
            where.grid.tp == 2,
        )
        for where in (Setting.of(tp=2), Setting.of(dp=2, stage=3))
    ] + [
        FaultCase(
            "checkpoints",
            "the newest is of a run in a spike, D2",
            lambda folder: unhealthy(folder, Setting.of(dp=2)),
            Expected(
                0,
                (
                    r"passed over .*iter_0000030: something was wrong with the run then",
                    r"loaded .*iter_0000020",
                ),
                (10, 20),
            ),
            True,
        )
    ]
