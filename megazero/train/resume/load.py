"""Loads a checkpoint into an engine, when a run begins or goes back to its last healthy checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megazero.checkpoint.part import WEIGHT, Source
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.replica_rows import ReplicaRows
from megazero.checkpoint.saver import together
from megazero.checkpoint.shards import state_keys
from megazero.checkpoint.upcycling import Upcycled, router_names
from megazero.config.tree.config import Config
from megazero.errors import CheckpointError, DamagedCheckpointError, LostFolderError
from megazero.mpu.messages import gather_values
from megazero.optim.loss_scaler import ScalerState
from megazero.spec.resolve import model_spec
from megazero.train.resume.facts import RunFacts
from megazero.train.resume.fit import check_tensors
from megazero.train.resume.keepers import StateGroup, keepers_of
from megazero.train.resume.saved import Checkpoint, candidates_of
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState

Restore = Callable[[], TrainState | None]
"""Load the last healthy checkpoint and return its state; None without one. Every rank calls this."""


def load_state(
    config: Config,
    engine: Engine,
    checkpoint: CheckpointReader,
    run: RunFacts | None,
    *,
    begins_experts: bool = False,
) -> int:
    """Load a checkpoint into an engine; every rank calls this.

    Args:
        run: the checkpoint's facts about its run; None loads only the model.
        begins_experts: whether experts are copies of the checkpoint's dense MLPs.

    Returns:
        The seed of the dropout streams.

    Raises:
        CheckpointError: on every rank: it does not fit the engine's model, or lacks state to be loaded.
    """
    section = config.checkpoint
    drawn = None if section.no_load_rng else run
    counted = None  # the updates made, and the loss scaler's state
    if run is not None and not section.no_load_optim:
        if run.updates is None or run.scaler is None:
            raise CheckpointError(
                f"`{checkpoint.folder}` must hold optimizer state, but has none; set --no-load-optim "
                "or --finetune"
            )
        counted = run.updates, ScalerState(**dict(run.scaler))
    wanted = {StateGroup.PROGRESS: run, StateGroup.UPDATES: counted, StateGroup.RANDOM: drawn}
    # New routers keep their initial weights, because the dense model has none.
    seeded = router_names(model_spec(config.model)) if begins_experts else ()
    keepers = keepers_of(engine, {group for group, there in wanted.items() if there is not None}, seeded)
    weights: Source = Upcycled(checkpoint, model_spec(config.model)) if begins_experts else checkpoint
    updated, *others = keepers
    parts = updated.parts_from(weights)
    source = ReplicaRows(weights, parts, engine.optimizer.private_kinds)
    # This takes communication, so it comes before reading, in which single ranks may fail.
    unused = _unused(source, engine, moments=counted is not None)

    def read() -> None:
        check_tensors(source, parts, checkpoint.folder, unused)
        source.read([*parts, *(part for keeper in others for part in keeper.parts_from(source))])

    # An error on one rank is raised on all, so that no rank waits in the next call for one that has failed.
    together(engine.context, read, f"load {checkpoint.folder}")
    # In this order: publishing masters would overwrite the weights in use, and generators come last, so that
    # no other keeper draws from them afterwards.
    for keeper in keepers:
        keeper.apply(checkpoint, checkpoint.folder)
    if counted is not None:
        engine.optimizer.updates, engine.scaler_state = counted
    return config.training.seed if drawn is None else drawn.stream_seed


def _unused(source: Source, engine: Engine, moments: bool) -> list[str]:
    """The checkpoint's tensors that no rank reads; moments only if they are loaded."""
    context = engine.context
    own = sorted(str(key) for key in state_keys(engine.optimizer))
    asked = {name for names in gather_values(context.model, own, context.device) for name in names}
    # Tensors of other keepers may remain unused, such as weights in use if updates are no longer delayed.
    others = {keeper.kind for keeper in keepers_of(engine)}
    kinds = {key.kind for key in source.shapes} - others if moments else {WEIGHT}
    candidates = [key for key in source.shapes if key.kind in kinds]
    return [str(key) for key in candidates if str(key) not in asked]


def restore_last(snapshots: Snapshots) -> TrainState | None:
    """Load the newest healthy checkpoint that a run has saved; every rank calls this.

    Damaged checkpoints are skipped.

    Returns:
        Its state; None, with nothing changed, if there is no healthy checkpoint.

    Raises:
        CheckpointError: on every rank: a checkpoint is damaged, and there is no older intact one.
    """
    saver, engine, context = snapshots.saver, snapshots.engine, snapshots.context
    # A checkpoint in progress may be the newest healthy one, and must be copied before weights change.
    while saver.unsettled:
        try:
            saver.settle()
        except LostFolderError:
            raise
        except CheckpointError as error:  # it could not be saved: go back to an older one
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
