"""Rollback: a run continues from the state of its last healthy checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from megazero.checkpoint.folder import candidates
from megazero.checkpoint.reader import Verify
from megazero.checkpoint.saver import together
from megazero.errors import CheckpointError, DamagedCheckpointError, LostFolderError
from megazero.train.resume.keepers import load_state
from megazero.train.resume.saved import opened, saved_run
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState

Restore = Callable[[], TrainState | None]
"""Goes back to the last healthy checkpoint and returns its state; None without one. Every rank calls it."""


def restore_last(snapshots: Snapshots) -> TrainState | None:
    """Load the newest healthy checkpoint that a run has saved, and return its state; every rank calls this.

    Damaged ones are passed over.

    Returns:
        The state then; None if there is no healthy checkpoint, and nothing has been changed.

    Raises:
        CheckpointError: on every rank: one cannot be read, and none before it is whole.
    """
    saver, engine, context = snapshots.saver, snapshots.engine, snapshots.context
    # The one being written may be the newest healthy one, and its copies must be done before weights change.
    while saver.unsettled:
        try:
            saver.settle()
        except LostFolderError:
            raise
        except CheckpointError as error:  # one that cannot be saved is not there to go back to
            print(f"error: rank {context.rank} goes back further: {error}", file=sys.stderr, flush=True)
    own = {"finetune": False, "no_load_optim": False, "no_load_rng": False}
    section = snapshots.config.checkpoint.model_copy(update=own)
    config = snapshots.config.model_copy(update={"checkpoint": section})

    def look() -> list[str]:
        return [str(folder) for folder in candidates(saver.directory).folders]

    here = look if context.rank == 0 else None
    problem = None
    for folder in together(context, here, f"look into {saver.directory}"):
        try:
            reader = opened(Path(folder), Verify(section.verify_checkpoint), context)
            run = saved_run(reader)
            if run is None or not run.healthy:
                continue
            load_state(config, engine, context, reader, run)
        except DamagedCheckpointError as error:
            problem = error
            continue
        return run.state.train_state()
    if problem is not None:
        raise CheckpointError(f"the run was to go back, but {problem}; resume it from an older checkpoint")
    return None
