"""The common parts of tasks of answers: initial weights, epochs, and the evaluation after each."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Generic

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.part import Source
from megazero.config.derive import FREE_MODEL_FIELDS
from megazero.config.tree.config import Config
from megazero.data.build_report import ProgressLog
from megazero.data.labelled.dataset import EpochSamples, digest_of
from megazero.errors import DataError
from megazero.models.batch import Collate, M
from megazero.mpu.context import ParallelContext
from megazero.train.assemble import Run, TrainingTask
from megazero.train.finetuning.epochs import check_batch, feed_of, over_epochs
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.fit import check_model, free_to_begin
from megazero.train.resume.resume import Resumed
from megazero.train.resume.saved import Checkpoint
from megazero.train.resume.weights import take_foreign_weights, take_weights
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed, Feeds
from megazero.train.step.state import TrainState


@dataclass(frozen=True)
class Splits:
    """The samples of training and validation; None for one without files. Remarks are for a person."""

    train: EpochSamples | None
    valid: EpochSamples | None
    remarks: tuple[str, ...] = ()


class AnswerTask(TrainingTask, Generic[M]):
    """A task whose samples are answers in conversations."""

    def __init__(self, splits: Splits):
        self.splits = splits
        self.noted: dict[str, str] = {}
        self._feeds: dict[str, Feed[M]] = {}

    def completed(self, config: Config, context: ParallelContext) -> Config:
        """The configuration with what the task implies, its global batch and its length.

        Raises:
            ConfigError: a given setting contradicts the task, or a rule does not allow the whole.
        """
        train = self.splits.train
        return over_epochs(self.implied(config), None if train is None else len(train), context)

    def implied(self, config: Config) -> Config:
        """The configuration with the settings that the task implies.

        Raises:
            ConfigError: a given setting contradicts them.
        """
        return config

    @abstractmethod
    def collate(
        self, config: Config, vocab_size: int, context: ParallelContext, stream_seed: int | None
    ) -> Collate[M]:
        """The function that makes micro-batches; without a seed nothing is dropped."""

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

        def feed(samples: EpochSamples | None, seed: int | None) -> Feed[M] | None:
            collate = self.collate(config, vocabulary.size, context, seed)
            return None if samples is None else feed_of(config, context, samples, collate, seed)

        train, valid = feed(splits.train, resumed.stream_seed), feed(splits.valid, None)
        self._feeds = {} if valid is None else {"validation": valid}
        if splits.train is not None:
            self.noted["samples"] = digest_of(splits.train)
        return Feeds(train, valid, None)

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        named = {"training data": self.splits.train, "validation data": self.splits.valid}
        return {name: "none" if split is None else digest_of(split) for name, split in named.items()}

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse a new batch size, and other samples."""
        run = resumed.run
        if run is None or self.splits.train is None:
            return
        check_batch(resumed)
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
