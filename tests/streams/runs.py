"""Trainings that are recorded: a layout, what of it is offloaded, and whether it is saved meanwhile."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from megazero.config.derive import replicas_per_node
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import VOCABULARY, Layout
from tests.streams.recorder import Recorder, RecordingStreams
from tests.streams.recording import recorded_context, recordings


@dataclass(frozen=True)
class Run:
    """A training to record.

    Attributes:
        layout: the layout.
        offload: changes to what it offloads.
        inputs: whether the inputs of its layers, which are then recomputed, are offloaded.
        saves: whether it is saved in the background after each step.
        repeats: whether each step begins with an attempt whose gradients nobody reads.
        steps: how many.
    """

    layout: Layout
    offload: dict[str, Any] = field(default_factory=dict)
    inputs: bool = False
    saves: bool = False
    repeats: bool = False
    steps: int = 2

    @property
    def name(self) -> str:
        places = "-".join(f"{name}={value}" for name, value in self.offload.items())
        marks = [self.layout.dtype, *([places] if places else [])]
        marks += [name for name in ("inputs", "saves", "repeats") if getattr(self, name)]
        return "-".join([self.layout.name, *marks])

    def config(self, folder: str) -> Config:
        """The configuration, with a folder for what it writes."""
        config = self.layout.config()
        changes: dict[str, Any] = {}
        if self.offload:
            changes["offload"] = OffloadConfig(**{"path": folder, "block_size": 4096, **self.offload})
        if self.inputs:
            changes["recompute"] = RecomputeConfig(granularity="full", offload=True)
        if self.saves:
            changes["checkpoint"] = CheckpointConfig(save=f"{folder}/saved", async_save=True)
        return config.model_copy(update=changes)


@dataclass(frozen=True)
class Outcome:
    """What a rank recorded, and what it computed: losses of each step, and the weights by name."""

    recorder: Recorder
    losses: list[dict[str, float | None]]
    weights: dict[str, Any]


def train(config: Config, context: ParallelContext, recorder: Recorder, run: Run) -> Outcome:
    """Train on one rank."""
    plan = training_plan_of(config, context.data.size)
    engine, state, timers = verification_engine(config, plan, context), TrainState(), Timers()
    snapshots = None
    if run.saves:
        snapshots = Snapshots(config, plan, engine, context, VOCABULARY, config.training.seed)
    losses = []
    with recorder.over_steps():
        for _ in range(run.steps):
            step = plan.at(state.progress)
            if run.repeats:
                one = torch.ones((), dtype=torch.float64)
                with mock.patch.object(engine.optimizer, "grad_squares", return_value=one):
                    engine.attempt(micro_batches(config, context, step), state.progress, timers)
            attempt = engine.attempt(micro_batches(config, context, step), state.progress, timers)
            if snapshots is not None:
                snapshots.saver.wait_for_copies()
            result = engine.update(attempt, state.progress, timers)
            state = state.after(step, result.skipped)
            losses.append(result.losses.labelled())
            if snapshots is not None:
                snapshots.save(state)
    if snapshots is not None:
        while snapshots.saver.unsettled:
            snapshots.saver.settle()
        snapshots.saver.close()
    weights = {spec.name: kinds["weight"].clone() for spec, kinds in engine.optimizer.full_state(("weight",))}
    return Outcome(recorder, losses, weights)


def record(
    run: Run, *, watched: bool = True, quick: bool = False, streams: type[RecordingStreams] = RecordingStreams
) -> list[Outcome]:
    """Train and record a run on ranks as threads; without `watched`, as it is on a CPU."""
    world, grid = ThreadWorld(run.layout.world_size), run.layout.grid

    with tempfile.TemporaryDirectory() as folder:
        config = run.config(folder)

        def work(rank: int) -> Outcome:
            recorder = Recorder(quick=quick)
            context = thread_context(world, grid, rank, node_size=replicas_per_node(config.zero))
            if not watched:
                return train(config, context, recorder, run)
            with recorder.on_thread():
                return train(config, recorded_context(context, recorder, streams(recorder)), recorder, run)

        with recordings():
            return world.run(work)


def races(outcomes: list[Outcome]) -> list[str]:
    """The pairs that nothing orders, on any rank."""
    return [
        f"rank {rank}: {earlier} | {later} ({count})"
        for rank, outcome in enumerate(outcomes)
        for (earlier, later), count in outcome.recorder.order.races.most_common(5)
    ]
