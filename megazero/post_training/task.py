"""The common parts of tasks of answers: initial weights, epochs, and the evaluation after each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Generic

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.part import Source
from megazero.config.derive import FREE_MODEL_FIELDS
from megazero.config.rules.table import check
from megazero.config.tree.config import Config
from megazero.data.build_report import ProgressLog
from megazero.data.labelled.dataset import EpochOrder, EpochSamples, digest_of
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.models.batch import Collate, M
from megazero.mpu.context import ParallelContext
from megazero.train.assemble import Run, TrainingTask
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.fit import check_model, free_to_begin
from megazero.train.resume.resume import Resumed
from megazero.train.resume.saved import Checkpoint
from megazero.train.resume.weights import take_foreign_weights, take_weights
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed, Feeds, make_feed
from megazero.train.step.state import TrainState


@dataclass(frozen=True)
class Splits:
    """The samples of training and validation; None for one without files. Remarks are for a person."""

    train: EpochSamples | None
    valid: EpochSamples | None
    remarks: tuple[str, ...] = ()


def completed(config: Config, splits: Splits, context: ParallelContext, **changes: object) -> Config:
    """Complete the configuration by the data: global batch and length.

    Args:
        changes: settings of the section `data` that the task implies.

    Raises:
        ConfigError: a rule does not allow the whole.
    """
    batch = config.batch.global_batch_size or config.batch.micro_batch_size * context.data.size
    steps = 1 if splits.train is None else -(-len(splits.train) // batch)
    training = {
        "train_iters": steps * max(1, config.finetune.epochs),
        "eval_interval": steps,
        "skip_train": splits.train is None,
    }
    complete = config.model_copy(
        update={
            "batch": config.batch.model_copy(update={"global_batch_size": batch}),
            "training": config.training.model_copy(update=training),
            "data": config.data.model_copy(update=changes),
        }
    )
    # Rules about the task apply to the user's own settings, and have been checked before.
    if violations := check(complete, context.world_size, {"finetune.task"}):
        raise ConfigError(violations)
    return complete


class AnswerTask(TrainingTask, Generic[M]):
    """A task whose samples are answers in conversations."""

    implied: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Settings of the section `data` that the task implies."""

    def __init__(self, splits: Splits):
        self.splits = splits
        self.noted: dict[str, str] = {}
        self._feeds: dict[str, Feed[M]] = {}

    def collate(
        self, config: Config, vocab_size: int, context: ParallelContext, stream_seed: int | None
    ) -> Collate[M]:
        """The function that makes micro-batches; without a seed nothing is dropped."""
        raise NotImplementedError

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        pretrained = config.finetune.pretrained_checkpoint
        if pretrained is None:
            remarks = take_foreign_weights(config, context, vocab_size, engine)
            return remarks or ("training from scratch: neither `pretrained_checkpoint` nor `load_hf` is set",)
        checkpoint = Checkpoint.at(pretrained, config.checkpoint.verify_checkpoint, context)
        free = FREE_MODEL_FIELDS | free_to_begin(checkpoint.model, True)
        check_model(config.model, vocab_size, checkpoint.model, checkpoint.folder, free)

        def opened() -> AbstractContextManager[Source]:
            return checkpoint

        take_weights(engine, context, str(checkpoint.folder), opened, spare=())
        return (f"took the weights from {checkpoint.folder}",)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        config, splits = resumed.config, self.splits

        def feed(samples: EpochSamples | None, epochs: int, seed: int | None) -> Feed[M] | None:
            collate = self.collate(config, vocabulary.size, context, seed)
            return None if samples is None else feed_of(config, context, samples, collate, epochs, seed)

        train = feed(splits.train, config.finetune.epochs, resumed.stream_seed)
        valid = feed(splits.valid, 1, None)
        self._feeds = {} if valid is None else {"validation": valid}
        if splits.train is not None:
            self.noted["samples"] = digest_of(splits.train)
        return Feeds(train, valid, None)

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        named = {"training data": self.splits.train, "validation data": self.splits.valid}
        return {name: "none" if split is None else digest_of(split) for name, split in named.items()}

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse a new batch size, with which iterations would be other epochs, and other samples."""
        state, batch, run = resumed.state, resumed.config.batch.global_batch_size, resumed.run
        if run is None or self.splits.train is None:
            return
        assert batch is not None, "`completed` sets it"
        if state.consumed_samples != state.iteration * batch:
            raise CheckpointError(
                f"`global_batch_size` must stay {state.consumed_samples / state.iteration:g} until the last "
                f"epoch, but is {batch}; set it, or begin anew in another folder"
            )
        if run.task.get("samples", self.noted["samples"]) != self.noted["samples"]:
            raise DataError(
                "`train_data` must give the samples with which the checkpoint was trained, but gives others; "
                "put the files, the tokenizer, the template and --seq-length back, or begin anew in another "
                "folder"
            )

    def remarks(self, run: Run) -> Iterable[str]:
        return *self.splits.remarks, *run.resumed.remarks

    def facts(self) -> Mapping[str, object]:
        return {"task": self.noted}

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        def evaluate(split: str, state: TrainState) -> None:
            began, feed = time.perf_counter(), self._feeds[split]
            size = run.resumed.training_plan.evaluations.batch_size
            starts = range(0, len(feed.dataset), size)
            batches = (feed.micro_batches(start, size // feed.spec.stride) for start in starts)
            log = ProgressLog(run.monitor.message, f"evaluating on {split}")
            with run.meters.timers("evaluation"):
                losses, counted, _ = run.resumed.engine.evaluate(log.over(batches, len(starts)))
            seconds = time.perf_counter() - began
            run.monitor.evaluation(self.metrics(state.progress, split, losses, counted, seconds))

        interval = run.resumed.training_plan.evaluations.interval
        return PeriodicEvaluation(evaluate, interval, self._feeds.keys())

    metrics: ClassVar[type[EvalMetrics]] = EvalMetrics
    """Makes the metrics of an evaluation."""

    def conclude(self, run: Run, state: TrainState) -> None:
        """Do nothing: the last step ends the training."""

    def close(self) -> None:
        """Do nothing: the task opens no resources of its own."""


def feed_of(
    config: Config,
    context: ParallelContext,
    samples: EpochSamples,
    collate: Collate[M],
    epochs: int = 1,
    stream_seed: int | None = None,
) -> Feed[M]:
    """Make a feed: with a stream seed all epochs, shuffled, else one in the files' order."""
    batch, trains = config.batch, stream_seed is not None
    assert batch.global_batch_size is not None, "`completed` sets it"
    order = EpochOrder(samples, batch.global_batch_size, epochs, config.training.seed if trains else None)
    spec = SamplerSpec(
        num_samples=len(order),
        micro_batch_size=batch.micro_batch_size,
        data_parallel_rank=context.data.rank,
        data_parallel_size=context.data.size,
    )
    return make_feed(order, BatchSampler(spec), collate, config.data.num_workers if trains else 0)
