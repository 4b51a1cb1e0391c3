"""The evaluation of fine-tuning on whole files, with the same scores on any layout."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megazero.data.build_report import ProgressLog
from megazero.models.classifier import SCORES
from megazero.models.classifier_batch import LabelledBatch
from megazero.mpu.context import ParallelContext
from megazero.train.finetuning.best import BestModel
from megazero.train.finetuning.scores import TaskReport
from megazero.train.finetuning.task import LabelledSplit, TaskData
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.observe.monitors.base import Monitor
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed
from megazero.train.step.losses import Losses
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers


@dataclass(frozen=True)
class Answers:
    """A model's answers to the samples of a split.

    Attributes:
        losses: the losses over samples with a label, by term.
        counted: number of samples with a label.
        scores: float32 [samples, classes].
    """

    losses: Losses
    counted: int
    scores: np.ndarray


def answer(
    engine: Engine, feed: Feed[LabelledBatch], count: int, batch_size: int, classes: int, log: ProgressLog
) -> Answers:
    """Evaluate the first `count` samples of a feed in whole global batches; every rank calls this.

    Args:
        feed: the samples; it fills the last batch with samples without labels.
    """
    spec, starts = feed.spec, range(0, count, batch_size)
    batches = (feed.micro_batches(start, batch_size // spec.stride) for start in starts)
    losses, counted, outputs = engine.evaluate(log.over(batches, len(starts)))
    own = spec.data_parallel_rank * spec.micro_batch_size
    parts = {
        start + i * spec.stride + own: output[SCORES]
        for start, by_number in zip(starts, outputs, strict=True)
        for i, output in by_number.items()
    }
    scores = _gathered(parts, (len(starts) * batch_size, classes), engine.context)
    return Answers(losses, counted, scores[:count])


def _gathered(parts: dict[int, Tensor], shape: tuple[int, int], context: ParallelContext) -> np.ndarray:
    """Gather the scores of all ranks, given number of a first sample -> scores of this rank.

    Each sample's scores are added to zeros of other ranks, so the sum is exact.
    """
    scores = torch.zeros(shape, dtype=torch.float32, device=context.device)
    if context.tp.rank == 0:
        for first, part in parts.items():
            scores[first : first + len(part)] = part
    context.world.all_reduce(scores).wait()
    return scores.cpu().numpy()


@dataclass(frozen=True)
class TaskMetrics(EvalMetrics):
    """The metrics of one evaluation on labelled files.

    Attributes:
        report: the report on all samples.
        files: path of a file -> the report on its samples.
    """

    predicts_text: ClassVar[bool] = False

    report: TaskReport
    files: Mapping[str, TaskReport]

    def record(self) -> dict[str, object]:
        """Name -> value, with the reports as JSON and without a perplexity."""
        files = {path: report.record() for path, report in self.files.items()}
        return {**super().record(), **self.report.record(), "files": files}


class TaskEvaluation:
    """Reports the loss, accuracy, F1 and confusion matrix on a split of labelled files.

    After validation, the model is saved if it is the best so far.

    Args:
        feeds: name of a split with samples -> its feed.
        best: saves the best model; None if nothing is saved.
    """

    def __init__(
        self,
        engine: Engine,
        data: TaskData,
        feeds: Mapping[str, Feed[LabelledBatch]],
        batch_size: int,
        best: BestModel | None,
        monitor: Monitor,
        timers: Timers,
    ):
        self.engine = engine
        self.data = data
        self.feeds = feeds
        self.batch_size = batch_size
        self.best = best
        self.monitor = monitor
        self.timers = timers

    def answers(self, split: str) -> Answers:
        """Compute the model's answers to a split, without a report; every rank calls this."""
        count = len(self._labelled(split))
        log = ProgressLog(self.monitor.message, f"evaluating on {split}")
        classes = len(self.data.labels)
        with self.timers("evaluation"):
            return answer(self.engine, self.feeds[split], count, self.batch_size, classes, log)

    def __call__(self, split: str, state: TrainState) -> Answers:
        """Report on a split, and return the answers; every rank calls this."""
        began = time.perf_counter()
        answers = self.answers(split)
        report, files = self._reports(self._labelled(split), answers)
        seconds = time.perf_counter() - began
        self.monitor.evaluation(
            TaskMetrics(state.progress, split, answers.losses, answers.counted, seconds, report, files)
        )
        self._tell_of(split, report, files)
        if split == "validation":
            self._offer(state, report, answers.losses.main)
        return answers

    def _labelled(self, split: str) -> LabelledSplit:
        labelled = self.data.valid if split == "validation" else self.data.test
        assert labelled is not None, f"there are no samples for {split}"
        return labelled

    def _reports(self, labelled: LabelledSplit, answers: Answers) -> tuple[TaskReport, dict[str, TaskReport]]:
        labels, truth = self.data.labels, labelled.samples.labels
        files, start = {}, 0
        for file in labelled.files:
            rows = slice(start, start + len(file.samples))
            files[file.path] = TaskReport.of(labels, truth[rows], answers.scores[rows])
            start = rows.stop
        return TaskReport.of(labels, truth, answers.scores), files

    def _tell_of(self, split: str, report: TaskReport, files: dict[str, TaskReport]) -> None:
        if not report.count:
            self.monitor.message(f"{split}: no sample has a label")
            return
        for path, file_report in files.items() if len(files) > 1 else ():
            if file_report.count:
                self.monitor.message(
                    f"{split}: {path}: accuracy {file_report.accuracy:.4f} of {file_report.count}, macro F1 "
                    f"{file_report.macro_f1:.4f}"
                )
        self.monitor.message(
            f"{split}: accuracy {report.accuracy:.4f} of {report.count}, macro F1 {report.macro_f1:.4f}"
        )
        for line in report.table():
            self.monitor.message(line)

    def _offer(self, state: TrainState, report: TaskReport, loss: float | None) -> None:
        best = self.best
        if best is None or report.accuracy is None or not state.iteration:
            return
        if loss is not None and not math.isfinite(loss):
            loss = None
        if best.offer(state, {"accuracy": report.accuracy, "macro_f1": report.macro_f1, "loss": loss}):
            self.monitor.message(f"saved the best model so far to {best.folder}: {best.score}")
            if (label := report.only_answer) is not None:
                otherwise = "" if best.metric == "macro_f1" else ", or choose by --best-metric macro_f1"
                self.monitor.message(
                    f"warning: the best model so far answers {label!r} to each of {report.count} samples, "
                    f"whatever their text; train longer or at another rate{otherwise}"
                )
