"""Rollback: a run continues from the state of its last healthy checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megazero.errors import CheckpointError, DamagedCheckpointError, LostFolderError
from megazero.train.resume.keepers import load_state
from megazero.train.resume.saved import Checkpoint, candidates_of
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
    own = {"no_load_optim": False, "no_load_rng": False}
    section = snapshots.config.checkpoint.model_copy(update=own)
    config = snapshots.config.model_copy(update={"checkpoint": section})
    problem, listed = None, candidates_of(saver.directory, None, context)
    for folder in listed.folders:
        try:
            checkpoint = Checkpoint.opened(folder, section.verify_checkpoint, context, listed.states)
            run = checkpoint.run
            if run is None or not run.healthy:
                continue
            load_state(config, engine, checkpoint, run)
        except DamagedCheckpointError as error:
            problem = error
            continue
        return run.state.train_state()
    if problem is not None:
        raise CheckpointError(f"the run was to go back, but {problem}; resume it from an older checkpoint")
    return None
