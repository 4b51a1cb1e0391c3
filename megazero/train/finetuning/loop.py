"""The training loop of fine-tuning: evaluations are of whole files, and the best model is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from megazero.models import LabelledBatch
from megazero.mpu import ParallelContext
from megazero.train.engine import Engine
from megazero.train.feed import Feed
from megazero.train.finetuning.answers import Answers, answer
from megazero.train.finetuning.best import BestModel
from megazero.train.finetuning.scores import TaskReport
from megazero.train.finetuning.task import LabelledSplit, TaskData
from megazero.train.loop import Loop
from megazero.train.metrics import EvalMetrics
from megazero.train.monitors import Monitor
from megazero.train.run_plan import Feeds, RunPlan
from megazero.train.snapshot import Snapshots
from megazero.train.state import TrainState


@dataclass(frozen=True)
class TaskMetrics(EvalMetrics):
    """One evaluation of labelled files.

    Attributes:
        report: how good all answers are.
        files: the same for each file, by its path.
    """

    predicts_text: ClassVar[bool] = False

    report: TaskReport
    files: Mapping[str, TaskReport]

    def record(self) -> dict[str, object]:
        """Name -> value, with the reports as JSON and without a perplexity."""
        names = [field.name for field in fields(EvalMetrics)]
        metrics = EvalMetrics(**{name: getattr(self, name) for name in names}).record()
        del metrics["perplexity"]
        files = {path: report.record() for path, report in self.files.items()}
        return {**metrics, **self.report.record(), "files": files}


@dataclass(frozen=True)
class EvaluationData:
    """The inputs of evaluations.

    Attributes:
        data: the labelled splits.
        classes: number of scores of a sample.
        valid, test: feeds that go on without end; None for a split without samples.
        best: keeps the best model; None if nothing is saved.
    """

    data: TaskData
    classes: int
    valid: Feed[LabelledBatch] | None
    test: Feed[LabelledBatch] | None
    best: BestModel | None


class TaskLoop(Loop):
    """Trains on labelled samples.

    Args:
        engine, plan, feeds, monitor, checkpoints, context: as for `Loop`; only the feed for training is
            read, and `valid` says whether there is anything to evaluate.
        inputs: the inputs of evaluations.
    """

    def __init__(
        self,
        engine: Engine,
        plan: RunPlan,
        feeds: Feeds,
        monitor: Monitor,
        checkpoints: Snapshots | None,
        context: ParallelContext,
        inputs: EvaluationData,
    ):
        super().__init__(engine, plan, feeds, monitor, checkpoints, context)
        self.inputs = inputs

    def answers(self, split: str) -> Answers:
        """The model's answers to a split, without a report; every rank calls this."""
        labelled, feed = self._split(split)
        batch = self.plan.training_plan.evaluations.batch_size
        with self.timers("evaluation"):
            return answer(self.engine, feed, len(labelled), batch, self.inputs.classes)

    def evaluate(self, split: str, state: TrainState) -> None:
        """Report the loss, accuracy, F1 and confusions on a split, as `examine` does."""
        self.examine(split, state)

    def examine(self, split: str, state: TrainState) -> Answers:
        """Report the loss, accuracy, F1 and confusions on a split, and return the answers.

        Validation is also a chance for the model to become the best so far. Every rank calls this.
        """
        began = time.perf_counter()
        answers = self.answers(split)
        report, files = self._reports(self._split(split)[0], answers)
        self.monitor.evaluation(
            TaskMetrics(
                iteration=state.iteration,
                split=split,
                losses=answers.losses,
                consumed_samples=state.consumed_samples,
                consumed_tokens=state.consumed_tokens,
                num_tokens=answers.counted,
                seconds=time.perf_counter() - began,
                report=report,
                files=files,
            )
        )
        self._tell_of(split, report, files)
        if split == "validation":
            self._offer(state, report)
        return answers

    def _split(self, split: str) -> tuple[LabelledSplit, Feed[LabelledBatch]]:
        inputs, validates = self.inputs, split == "validation"
        labelled, feed = (inputs.data.valid, inputs.valid) if validates else (inputs.data.test, inputs.test)
        assert labelled is not None, f"there are no samples for {split}"
        assert feed is not None, f"there are no samples for {split}"
        return labelled, feed

    def _reports(self, labelled: LabelledSplit, answers: Answers) -> tuple[TaskReport, dict[str, TaskReport]]:
        labels, truth = self.inputs.data.labels, labelled.samples.labels
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

    def _offer(self, state: TrainState, report: TaskReport) -> None:
        best = self.inputs.best
        if best is None or report.accuracy is None or not state.iteration:
            return
        if best.offer(state, report.accuracy):
            self.monitor.message(f"saved the best model so far to {best.folder}")
