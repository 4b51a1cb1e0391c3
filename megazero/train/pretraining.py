"""Pretraining: a run on unlabelled samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.data.changing.start import Before
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.cpu_cores import others_running
from megazero.mpu.launch import Launch
from megazero.train.assemble import Run, TrainingTask, assemble
from megazero.train.guards.agreement import samples_of
from megazero.train.guards.blends import blend_facts
from megazero.train.observe.evaluation import LossEvaluation, PeriodicEvaluation
from megazero.train.observe.host import host_remarks, ranks_here
from megazero.train.parts.chunks import DTYPES
from megazero.train.parts.feeds import build_feeds
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.process import in_job
from megazero.train.resume.facts import DataFacts
from megazero.train.resume.fit import compare_data, data_record
from megazero.train.resume.resume import Resumed
from megazero.train.resume.weights import origin_of, take_foreign_weights
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feeds
from megazero.train.step.state import TrainState
from megazero.zero.store.store import offloaded_bytes

MoreEvaluations = Callable[[Run, PeriodicEvaluation], PeriodicEvaluation]
"""Adds to a run's evaluations; the socket of `--eval-tasks`, into which commands plug what runs the tasks."""


def pretrain(
    config: Config,
    launch: Launch | None = None,
    disk: Disk | None = None,
    more: MoreEvaluations | None = None,
) -> TrainState:
    """Pretrain as configured, on this rank of the job.

    Args:
        launch: this rank's place in the job; by default, the launcher's environment says it.
        more: runs `--eval-tasks`.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    if config.finetune.task is not None:
        raise ConfigError(
            f"`task` must be left out of pretraining, but is {config.finetune.task}; run `megazero finetune`"
        )
    return in_job(config, launch, lambda joined: pretrain_on(config, joined, disk, more))


class Pretraining(TrainingTask):
    """The task of pretraining."""

    def __init__(self, more: MoreEvaluations | None = None) -> None:
        self._more = more
        self._record: list[DataFacts] | None = None
        self._blend: Mapping[str, object] = {}
        self._compared: tuple[str, ...] = ()
        self._origin: Mapping[str, object] | None = None
        self._others = others_running(own=ranks_here())  # before this program itself is busy

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        return take_foreign_weights(config, context, vocab_size, engine)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        history = None if resumed.run is None else resumed.run.blend
        before = Before(history, resumed.state.consumed_samples)
        plan, seed = resumed.training_plan, resumed.stream_seed
        return build_feeds(resumed.config, plan, vocabulary, context, seed, before)

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        return samples_of(feeds.datasets)

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        self._record = data_record(feeds.datasets[0], resumed.engine.context)
        self._blend = blend_facts(feeds.datasets[0])
        passes = not resumed.config.data.verify_data
        self._origin = resumed.origin or origin_of(resumed.config)
        before = None if resumed.run is None else resumed.run.data
        self._compared = compare_data(before, self._record, changes_pass=passes)

    def remarks(self, run: Run) -> Iterable[str]:
        engine, dtype = run.resumed.engine, DTYPES[run.resumed.config.precision.dtype]
        yield from host_remarks(dtype, run.meters.matmul_rate, engine.context.device, self._others)
        if any(communicator.second for communicator in engine.context.plan.communicators):
            yield from ("communicators of the first rank:", *engine.context.plan.table())
        yield from (*run.resumed.remarks, *self._compared, *engine.distillation.remarks)
        datasets = (dataset for dataset in run.feeds.datasets if dataset is not None)
        yield from dict.fromkeys(note for dataset in datasets for note in dataset.notes)
        for tier, size in offloaded_bytes(engine.optimizer.store).items():
            yield f"offload: each rank keeps {size / 2**20:,.1f} MiB of its state in {tier}"

    def facts(self) -> Mapping[str, object]:
        origin = {} if self._origin is None else {"converted_from": dict(self._origin)}
        return {"data": [record.model_dump() for record in self._record or ()], **self._blend, **origin}

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        samples, timers = run.resumed.training_plan.evaluations, run.meters.timers
        evaluate = LossEvaluation(run.resumed.engine, run.feeds, samples, run.monitor, timers)
        splits = {"validation": run.feeds.valid, "test": run.feeds.test}
        there = {split for split, feed in splits.items() if feed is not None}
        evaluations = PeriodicEvaluation(evaluate, samples.interval, there)
        return evaluations if self._more is None else self._more(run, evaluations)


def pretrain_on(
    config: Config, joined: ParallelContext, disk: Disk | None = None, more: MoreEvaluations | None = None
) -> TrainState:
    """Pretrain on a rank that has joined its job, such as a thread of a test.

    Raises:
        MegazeroError: as `pretrain`.
    """
    if config.training.eval_tasks is not None and more is None:
        raise ConfigError("`eval_tasks` must be left out here; run `megazero pretrain`, which takes it")
    task = Pretraining(more)
    return assemble(config, build_vocabulary(config), joined, task, disk).carry_out(task, disk)
