"""Checkpoints that a setting names, which all ranks open alike."""

from __future__ import annotations

from pathlib import Path

from megazero.checkpoint import CheckpointReader, Verify, together
from megazero.checkpoint.locate import one_checkpoint
from megazero.mpu import ParallelContext
from megazero.train.state_json import SavedModel, saved_model


def checkpoint_at(given: str, context: ParallelContext, step: int | None = None) -> Path:
    """Find the checkpoint that a path means, as the first rank sees it; every rank calls this.

    `step` asks for the checkpoint of one step of a run.

    Raises:
        CheckpointError: on every rank: there is none.
    """
    look = (lambda: str(one_checkpoint(Path(given), step))) if context.rank == 0 else None
    return Path(together(context, look, f"look into {given}")[0])


def opened(folder: Path, verify: Verify, context: ParallelContext) -> CheckpointReader:
    """Open a checkpoint on all ranks; every rank calls this.

    Raises:
        CheckpointError: on every rank: it cannot be read.
    """
    readers: list[CheckpointReader] = []
    together(context, lambda: readers.append(CheckpointReader(folder, verify=verify)), f"open {folder}")
    return readers[0]


def model_at(folder: Path, context: ParallelContext) -> SavedModel:
    """Read a checkpoint's description of its model; every rank calls this.

    Raises:
        CheckpointError: on every rank: it cannot be read, or has no description.
    """
    reader, models = opened(folder, Verify.SIZE, context), []
    together(context, lambda: models.append(saved_model(reader)), f"open {folder}")
    return models[0]
