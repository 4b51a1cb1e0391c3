"""The concern that evaluates periodically, and the evaluation of pretraining."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from megazero.config.training_plan import Evaluations
from megazero.data.build_report import ProgressLog
from megazero.data.changing.validation import ValidationSet, ValidationSets
from megazero.data.sampler import BatchSampler
from megazero.models.batch import MicroBatch
from megazero.mpu.messages import first_value
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.observe.monitors.base import Monitor
from megazero.train.step.concern import CONTINUE, Concern, StepContext, Verdict
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed, Feeds
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers

Evaluate = Callable[[str, TrainState], object]
"""(split, state): evaluate on ``validation`` or ``test`` and report the result; every rank calls this."""


class PeriodicEvaluation(Concern):
    """Evaluates at an interval, and at the end.

    Args:
        interval: iterations between evaluations of the validation data, or None.
        splits: the splits that have samples, of ``validation`` and ``test``.
    """

    def __init__(self, evaluate: Evaluate, interval: int | None, splits: Collection[str]):
        self.evaluate = evaluate
        self.interval = interval
        self.splits = splits
        self._evaluated_at = -1

    def stands_at(self, state: TrainState) -> None:
        self._evaluated_at = state.iteration

    def after(self, now: StepContext) -> Verdict:
        if "validation" in self.splits and now.due(self.interval):
            self.evaluate("validation", now.state)
            self._evaluated_at = now.state.iteration
        return CONTINUE

    def at_the_end(self, state: TrainState) -> None:
        """Evaluate the splits that have not been evaluated in this state."""
        if "validation" in self.splits and self._evaluated_at < state.iteration:
            self.evaluate("validation", state)
        if "test" in self.splits:
            self.evaluate("test", state)


class LossEvaluation:
    """Evaluates the losses on the next samples of a split, without any effect on training.

    `samples` says which samples an evaluation reads; `monitor` receives the losses.
    """

    def __init__(self, engine: Engine, feeds: Feeds, samples: Evaluations, monitor: Monitor, timers: Timers):
        self.engine = engine
        self.feeds = feeds
        self.samples = samples
        self.monitor = monitor
        self.timers = timers

    def __call__(self, split: str, state: TrainState) -> None:
        feed = self.feeds.valid if split == "validation" else self.feeds.test
        assert feed is not None, f"there are no samples for {split}"
        if not isinstance(feed.dataset, ValidationSets):
            self._evaluate(split, state, feed)
            return
        for one in feed.dataset.datasets:
            spec = replace(feed.spec, num_samples=len(one))
            self._evaluate(f"{split}-{one.name}", state, Feed(one, BatchSampler(spec), feed.collate))

    def _evaluate(self, split: str, state: TrainState, feed: Feed[MicroBatch]) -> None:
        samples = self.samples
        start = 0 if split == "test" else samples.first_sample(state.iteration)

        def batches() -> Iterator[Sequence[MicroBatch]]:
            for i in range(samples.batches):
                yield feed.micro_batches(start + i * samples.batch_size, samples.micro_batches)

        began = time.perf_counter()
        with self.timers("evaluation"):
            progress = ProgressLog(self.monitor.message, f"evaluating on {split}")
            losses, tokens, _ = self.engine.evaluate(progress.over(batches(), samples.batches))
        seconds = time.perf_counter() - began
        if isinstance(feed.dataset, ValidationSet) and self._failed(split, feed.dataset):
            return
        self.monitor.evaluation(EvalMetrics(state.progress, split, losses, tokens, seconds))

    def _failed(self, split: str, dataset: ValidationSet) -> bool:
        """Whether samples of a set could not be read on some rank; every rank calls this."""
        context = self.engine.context
        first, dataset.fault = first_value(context.world, dataset.fault, context.device), None
        if first is not None:
            self.monitor.message(f"warning: there is no {split} loss: rank {first[0]}: {first[1]}")
        return first is not None
