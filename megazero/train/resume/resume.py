"""Resuming a run: choosing a checkpoint, checking that it fits, and loading its state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megazero.checkpoint.folder import Candidates
from megazero.checkpoint.lock import saved_elsewhere
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu.context import ParallelContext
from megazero.mpu.transports import transports
from megazero.train.resume.facts import RunFacts
from megazero.train.resume.fit import changed_sums, fit
from megazero.train.resume.load import load_state
from megazero.train.resume.saved import Checkpoint, candidates_of
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState


@dataclass(frozen=True)
class Resumed:
    """A run's engine and settings at its beginning, new or from a checkpoint.

    Attributes:
        engine: the engine, new or with the checkpoint's state.
        stream_seed: seed of the dropout streams.
        config: the run's configuration; its global batch is the checkpoint's if none was given.
        training_plan: the run's plan, from `state` on.
        remarks: remarks about the resume for a person.
        run: the checkpoint's facts about the run; None if training begins anew.
        origin: the model from which the weights were first converted; None if unknown.
    """

    engine: Engine
    stream_seed: int
    config: Config
    training_plan: TrainingPlan
    remarks: tuple[str, ...] = ()
    run: RunFacts | None = None
    origin: Mapping[str, object] | None = None

    @cached_property
    def state(self) -> TrainState:
        """The progress of the training."""
        return TrainState() if self.run is None else self.run.state.train_state()


def resume(
    config: Config,
    context: ParallelContext,
    vocab_size: int,
    build: Callable[[Config, TrainingPlan], Engine],
    begin: Callable[[Engine], tuple[str, ...]] | None = None,
) -> Resumed:
    """Resume from the newest intact checkpoint in `--load`, or begin anew; every rank calls this.

    If any rank finds a checkpoint damaged, all ranks skip it.

    Args:
        build: (configuration to continue with, plan) -> an engine with initial weights.
        begin: loads other initial weights into a new engine and returns remarks; None for none.

    Raises:
        ConfigError: the checkpoint's global batch, kept if none was given, cannot be distributed over
            these ranks.
        CheckpointError: on every rank: no checkpoint is intact; it has another model; its schedule differs
            without --override-opt_param-scheduler; or there is none although one is required.
    """
    section = config.checkpoint
    listed = candidates_of(section.load, section.ckpt_step, context) if section.load else Candidates(())
    if not (listed.folders or listed.remarks):
        if section.load:
            _may_start_without(config)
        training_plan = training_plan_of(config, context.data.size)
        new = build(config, training_plan)
        begun = begin(new) if begin else ()
        if section.load and not begun:
            begun = (f"warning: {section.load} holds no checkpoint; training starts from random weights",)
        return Resumed(new, config.training.seed, config, training_plan, begun)
    remarks = list(listed.remarks)
    # The newest first. An error of one rank in any step below is raised on all ranks, so that all skip a
    # damaged checkpoint, and none trains from another one.
    for folder in listed.folders:
        engine: Engine | None = None
        try:
            checkpoint = Checkpoint.opened(folder, section.verify_checkpoint, context, listed.states)
            # Experts begin as copies of the checkpoint's MLPs, unless it already has experts.
            begins = section.moe_use_upcycling and not checkpoint.model.settings.num_experts
            run = None if begins else checkpoint.run
            if section.finetune:
                run = None  # load only its weights
            # Checked before the engine is built, which takes memory, and minutes for a large model.
            kept, training_plan, changes = fit(config, checkpoint, run, vocab_size, context, begins)
            engine = build(kept, training_plan)
            seed = load_state(kept, engine, checkpoint, run, begins_experts=begins)
        except DamagedCheckpointError as error:
            remarks.append(f"passed over {folder}: {error}")
            if engine is not None:  # it may have loaded a part of the damaged checkpoint
                engine = None
                gc.collect()  # frees its memory before the next engine is built
            continue
        changes += filter(None, [saved_elsewhere(folder, checkpoint.saved_into)])
        if run is not None:
            changes += changed_sums(run, kept.parallel, transports(context), context.world_size)
        loaded = f"{'began experts from the dense model' if begins else 'loaded'} {folder}"
        origin = checkpoint.facts.get("converted_from")
        return Resumed(engine, seed, kept, training_plan, (*remarks, loaded, *changes), run, origin)
    raise DamagedCheckpointError(
        f"`load` must hold a whole checkpoint, but {section.load} has none: " + "; ".join(remarks)
    )


def _may_start_without(config: Config) -> None:
    """Refuse to start without a checkpoint in `--load` if a flag requires one."""
    section = config.checkpoint
    elsewhere = section.load_hf is not None or config.finetune.pretrained_checkpoint is not None
    needed_by = {
        "--exit-on-missing-checkpoint": section.exit_on_missing_checkpoint,
        "--finetune": section.finetune and not elsewhere,
        "--moe-use-upcycling": section.moe_use_upcycling and not elsewhere,
    }
    for flag, needs in needed_by.items():
        if needs:
            raise CheckpointError(
                f"`load` must hold a checkpoint with {flag}, but {section.load} has none; check the path"
            )
