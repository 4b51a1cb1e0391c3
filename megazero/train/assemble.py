"""From a configuration to a run. No other file imports all parts.

A run has a task, pretraining or fine-tuning, with everything in which these two differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import nn

from megazero.account.profiler import ProfiledRun
from megazero.account.profilers.build import profiler_of
from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.formats.hf.save import FolderAtEnd
from megazero.layers.state_space.library import scan_remarks
from megazero.models.objective import LossChange
from megazero.mpu.agreement import agree
from megazero.mpu.context import ParallelContext
from megazero.spec.resolve import model_spec
from megazero.train.build import build_model
from megazero.train.guards.agreement import tokenizer_and_place
from megazero.train.loop import Loop
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.host import measure_matmul_rate
from megazero.train.observe.meters import Meters
from megazero.train.observe.metrics import watch
from megazero.train.observe.monitors import build_monitors
from megazero.train.observe.monitors.base import Monitor
from megazero.train.parts.attention import attention_remarks
from megazero.train.parts.chunks import DTYPES
from megazero.train.parts.families import TokenFlops
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.keepers import keepers_of
from megazero.train.resume.resume import Resumed, resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.run_record import begin_record
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feeds
from megazero.train.step.state import TrainState


class TrainingTask(Protocol):
    """Everything in which pretraining and fine-tuning differ. Every rank calls all methods."""

    def objective(self, config: Config) -> LossChange | None:
        """The loss that replaces the model's own loss; None to train with that."""
        return None

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        """Load a new engine's initial weights; return remarks for a person."""

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        """Make the feeds of training and evaluation."""

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        """The facts about samples that all ranks must agree on."""

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse samples that differ from those of the resumed training.

        Raises:
            MegazeroError: on every rank.
        """

    def remarks(self, run: Run) -> Iterable[str]:
        """Remarks for a person before the first step."""

    def facts(self) -> Mapping[str, object]:
        """Further facts for all checkpoints, as JSON."""
        return {}

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        """Make the evaluation of the run."""

    def conclude(self, run: Run, state: TrainState) -> None:
        """Finish the task after the last step; by default there is nothing to do."""
        return

    def close(self) -> None:
        """Release the task's resources; by default there are none."""
        return


@dataclass
class Run:
    """A run on this rank of the job, with all its parts.

    Attributes:
        resumed: its configuration, plan, engine and initial state.
        feeds: its samples.
        meters: measures its steps.
        monitor: receives all metrics and messages.
        snapshots: saves it; None if nothing is saved.
        folder: gets the trained weights; None without `--save-hf`.
    """

    resumed: Resumed
    feeds: Feeds
    meters: Meters
    monitor: Monitor
    snapshots: Snapshots | None = None
    folder: FolderAtEnd | None = None

    def carry_out(self, task: TrainingTask, disk: Disk | None = None) -> TrainState:
        """Train, evaluate and conclude; `disk` writes what the task saves."""
        resumed, state = self.resumed, self.resumed.state
        try:
            evaluations, trains = task.evaluations(self, disk), not resumed.config.training.skip_train
            if trains:
                state = Loop(self.meters, self.feeds, self.monitor, self.snapshots, evaluations).fit(state)
            else:
                evaluations.at_the_end(state)
            if not trains or state.iteration >= resumed.training_plan.end.iteration:
                if self.folder is not None and trains:
                    parts = [part for keeper in keepers_of(resumed.engine, ()) for part in keeper.parts()]
                    self.folder.write(parts, resumed.engine.context, state.iteration, disk)
                    self.monitor.message(f"wrote the weights for transformers to {self.folder.out}")
                task.conclude(self, state)  # not if it stopped early: the next job continues it
            self.meters.profiler.conclude()
        finally:
            self.close(task)
        return state

    def close(self, task: TrainingTask) -> None:
        """Release the resources of the run and its task."""
        task.close()
        self.monitor.close()
        if self.snapshots is not None:
            self.snapshots.saver.close()  # which puts what monitors wrote, if the folder is at a URL
        if self.feeds.train is not None:
            self.feeds.train.close()


def assemble(
    config: Config,
    vocabulary: Vocabulary,
    joined: ParallelContext,
    task: TrainingTask,
    disk: Disk | None = None,
) -> Run:
    """Put a run together: resume or begin it, and check that all ranks agree on its samples.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    # Absolute paths, because checkpoints name the tokenizer's files and may be opened from any folder.
    config = config.model_copy(update={"tokenizer": config.tokenizer.located()})
    profiler = profiler_of(config, joined)
    context = profiler.watched(joined)
    build = partial(build_model, vocabulary, context, objective=task.objective(config))
    begin = partial(task.begin, config, context, vocabulary.size)
    resumed = resume(config, context, vocabulary.size, build, begin)
    config, engine, plan, state = resumed.config, resumed.engine, resumed.training_plan, resumed.state
    feeds = task.feeds(resumed, vocabulary, context)
    agree(
        joined.world,  # not the profiled one
        lambda: {**tokenizer_and_place(config, vocabulary, state), **task.samples(config, feeds)},
        context.device,
    )
    task.check(resumed, feeds)
    dtype = DTYPES[config.precision.dtype]
    rate = measure_matmul_rate(dtype, context.device)
    monitor = build_monitors(config, context.rank == 0, state.progress, plan.end)
    flops = TokenFlops(config, vocabulary)
    students = ((number, getattr(c, "student", c)) for number, c in engine.executor.chunks.items())
    models = {number: model for number, model in students if isinstance(model, nn.Module)}
    profiler.begin(ProfiledRun(engine.executor, models, engine.optimizer.store, flops, monitor.message))
    meters = Meters(config, plan, engine, flops, rate, monitor.message, profiler)
    watch(meters)
    run = Run(resumed, feeds, meters, monitor)
    try:
        scans = scan_remarks(model_spec(config.model), context.device)
        chosen = (*attention_remarks(config, context.device), *scans)
        for remark in (*chosen, *task.remarks(run)):
            monitor.message(remark)
        if config.checkpoint.save and not config.training.skip_train:
            seed = resumed.stream_seed
            run.snapshots = Snapshots(config, plan, engine, context, vocabulary.size, seed, disk)
            run.snapshots.note(task.facts())
        run.folder = FolderAtEnd.of(config, vocabulary.size, task.facts(), context)
        # After the folder is locked, and over groups that are not profiled.
        monitor.members += begin_record(meters, joined.world, state.progress)
    except BaseException:
        run.close(task)
        raise
    return run
