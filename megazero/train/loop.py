"""The training loop: steps, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megazero.config.difficulties import Difficulties
from megazero.config.horizon import Horizon
from megazero.config.steps import Step
from megazero.errors import CheckpointError, NumericsError
from megazero.layers import Skipping
from megazero.mpu import ParallelContext
from megazero.train.engine import Engine, StepResult
from megazero.train.feed import Feed
from megazero.train.metrics import EvalMetrics, StepMetrics
from megazero.train.monitors import Monitor
from megazero.train.signals import StopRequest
from megazero.train.snapshot import Snapshots
from megazero.train.stability import Stability
from megazero.train.state import TrainState
from megazero.train.timers import Timers

_MOST_BAD = 5  # steps in a row


@dataclass(frozen=True)
class RunPlan:
    """What a run will do, in numbers.

    Attributes:
        horizon: where training stops, the size of each step, and what evaluations read.
        flops_per_token: (tokens of a sequence, what the step skips) -> FLOPs of forward and backward for one
            of them, without a teacher's.
        matmul_rate: this rank's measured matmul rate, FLOP/s.
        save_interval: iterations between checkpoints, or None.
        exit_interval: stop at multiples of this many iterations, or None.
        exit_seconds: stop after this many seconds, or None.
        max_bad: end with an error after so many steps in a row whose gradients were not finite; None means
            as many as show that it is no search for a loss scale.
        stability: updates over which it is reported how steady the training is, or None.
        log_params_norm, log_num_zeros: whether steps report these.
        exact_timers: whether to wait for the device at both ends of each timed phase.
        log_interval: iterations between reports of what each expert got.
        difficulties: how difficult the samples of each step may be; None without a curriculum over samples.
    """

    horizon: Horizon
    flops_per_token: Callable[[int, Skipping], float]
    matmul_rate: float
    save_interval: int | None = None
    exit_interval: int | None = None
    exit_seconds: float | None = None
    max_bad: int | None = None
    stability: int | None = None
    log_params_norm: bool = False
    log_num_zeros: bool = False
    exact_timers: bool = False
    log_interval: int = 1
    difficulties: Difficulties | None = None


@dataclass(frozen=True)
class Feeds:
    """The sources of samples; a split without data is None."""

    train: Feed | None
    valid: Feed | None
    test: Feed | None


class Loop:
    """Runs a training until its end or until there is a reason to stop.

    Args:
        engine: makes the steps.
        plan: how many steps to make, and what happens between them.
        feeds: samples of each split.
        monitor: receives all metrics and messages.
        checkpoints: saves the run; None if nothing is to be saved.
        context: the ranks that agree on when to stop.
    """

    def __init__(
        self,
        engine: Engine,
        plan: RunPlan,
        feeds: Feeds,
        monitor: Monitor,
        checkpoints: Snapshots | None,
        context: ParallelContext,
    ):
        self.engine = engine
        self.plan = plan
        self.feeds = feeds
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.context = context
        self._saved_at = 0
        self.timers = Timers(context.device, synchronize=plan.exact_timers)

    def fit(self, state: TrainState) -> TrainState:
        """Train from `state` on and return the state at the end. SIGTERM saves and ends the training early.

        A checkpoint that cannot be written along the way is reported, and training continues. None is written
        in a row of steps whose gradients were not finite: one that is due waits for the end of the row.

        Raises:
            CheckpointError: on every rank, if the last checkpoint cannot be written.
            NumericsError: on every rank: the row is as long as `RunPlan.max_bad`, or a checkpoint would hold
                a number that is not finite. Earlier checkpoints stay.
        """
        started = time.monotonic()
        self._saved_at = evaluated_at = state.iteration
        reason, due = None, False
        with StopRequest() as stop:
            while state.iteration < self.plan.horizon.end.iteration and reason is None:
                state = self._step(state)
                self._check_row(state)
                if self._due(self.plan.horizon.evaluations.interval, state) and self.feeds.valid is not None:
                    self.evaluate("validation", state)
                    evaluated_at = state.iteration
                reason = self._after_step(state, stop, started)
                due |= self.checkpoints is not None and self._due(self.plan.save_interval, state)
                if due and reason is None and not self._failing(state):
                    self._on_the_way(lambda now=state: self._save(now))
                    due = False
            self._save_last(state)  # a second signal does not interrupt this
        if reason is not None:
            self.monitor.message(f"stopping after iteration {state.iteration}: {reason}")
            return state
        if self.feeds.valid is not None and evaluated_at < state.iteration:
            self.evaluate("validation", state)
        if self.feeds.test is not None:
            self.evaluate("test", state)
        return state

    def evaluate(self, split: str, state: TrainState) -> None:
        """Report the losses on the next part of the split, without any effect on training."""
        feed = self.feeds.valid if split == "validation" else self.feeds.test
        evaluations = self.plan.horizon.evaluations
        start = evaluations.first_sample(state.iteration) if split == "validation" else 0

        def batches():
            for i in range(evaluations.batches):
                yield feed.micro_batches(start + i * evaluations.batch_size, evaluations.micro_batches)

        began = time.perf_counter()
        with self.timers("evaluation"):
            losses, tokens = self.engine.evaluate(batches())
        self.monitor.evaluation(
            EvalMetrics(
                iteration=state.iteration,
                split=split,
                losses=losses,
                consumed_samples=state.consumed_samples,
                consumed_tokens=state.consumed_tokens,
                num_tokens=tokens,
                seconds=time.perf_counter() - began,
            )
        )

    def _step(self, state: TrainState) -> TrainState:
        began = time.perf_counter()
        step = self.plan.horizon.at(state.progress)
        with self.timers("data"):
            batches = self.feeds.train.micro_batches(
                state.consumed_samples, step.micro_batches, step.sequence_length, step.rows
            )
        hold = self.checkpoints.saver.wait_for_copies if self.checkpoints is not None else None
        result = self.engine.train_step(batches, state.progress, self.timers, hold)
        state = state.after(step, result.skipped, self._stability(state, result), bad=result.bad)
        # These take communication, so every rank computes them; the monitor only shows them.
        optimizer = self.engine.optimizer
        extras = {
            "params_norm": optimizer.params_norm() if self.plan.log_params_norm else None,
            "num_zeros": optimizer.count_zero_grads() if self.plan.log_num_zeros else None,
        }
        if self._due(self.plan.log_interval, state):
            extras["tokens_per_expert"] = self.engine.loads.report(result.tokens)
        seconds = time.perf_counter() - began
        self.monitor.step(self._metrics(state, result, step, seconds, extras))
        return state

    def _stability(self, state: TrainState, result: StepResult) -> Stability | None:
        """How steady the training is after this step; every rank knows the same."""
        if self.plan.stability is None:
            return None
        known = state.stability or Stability()
        if result.skipped:
            return known
        return known.after(result.losses.total, result.grad_norm, self.plan.stability)

    def _metrics(
        self, state: TrainState, result: StepResult, step: Step, seconds: float, extras: dict
    ) -> StepMetrics:
        rate = step.positions / seconds
        # Padding takes time only where it cannot be avoided, and is no use.
        useful = rate * (1.0 - result.losses.padding)
        each = self.plan.flops_per_token(step.sequence_length, result.skipping)
        each += self.engine.lessons.flops_per_token
        flops = useful * each / self.context.world_size
        return StepMetrics(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            losses=result.losses,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            seconds=seconds,
            tokens_per_second=rate,
            tflops=flops / 1e12,
            matmul_share=flops / self.plan.matmul_rate,
            global_batch_size=step.batch_size,
            num_micro_batches=step.micro_batches,
            first_bad_parameter=result.first_bad_parameter,
            phase_seconds=self.timers.collect(),
            sequence_length=step.sequence_length if self.plan.horizon.steps.lengths.grow else None,
            difficulties=self.plan.difficulties.at(step.before) if self.plan.difficulties else None,
            kept_tokens=step.kept_tokens,
            layers_run=result.skipping.layers_run,
            **_steadiness(state, result),
            **extras,
        )

    def _save(self, state: TrainState) -> None:
        with self.timers("save"):
            visible = self.checkpoints.save(state)
        self._saved_at = state.iteration
        for iteration in visible:
            self._tell(iteration)

    def _save_last(self, state: TrainState) -> None:
        """Make all checkpoints visible, including that of `state`."""
        if self.checkpoints is None:
            return
        self._settle()
        if self._failing(state):
            self.monitor.message(
                f"iteration {state.iteration} is not saved: {state.bad_in_a_row} updates in a row were "
                "skipped"
            )
        elif self._saved_at < state.iteration:
            self._save(state)
        while self.checkpoints.saver.unsettled:
            self._tell(self.checkpoints.saver.settle())

    def _settle(self) -> None:
        """Make the checkpoints that are being written visible, where there are any."""
        while self.checkpoints is not None and self.checkpoints.saver.unsettled:
            self._on_the_way(lambda: self._tell(self.checkpoints.saver.settle()))

    def _failing(self, state: TrainState) -> bool:
        """Whether steps keep being bad, other than in the search for a loss scale."""
        scaler, found = self.engine.scaler, self.engine.scaler_state
        return (found.overflows_at_floor if scaler.searches else state.bad_in_a_row) > 1

    def _check_row(self, state: TrainState) -> None:
        """Raises NumericsError if too many steps in a row were bad; what was saved before is there."""
        limit = self.plan.max_bad or (math.inf if self.engine.scaler.searches else _MOST_BAD)
        if state.bad_in_a_row < limit:
            return
        self._settle()
        raise NumericsError(
            f"`max_skipped_updates` in a row, {state.bad_in_a_row}, were skipped up to iteration "
            f"{state.iteration}, because a gradient was inf or NaN; checkpoints before them are kept: lower "
            "the learning rate, look at the data of these steps, or change the precision"
        )

    def _on_the_way(self, work: Callable[[], None]) -> None:
        """Do work that saves; if it fails, every rank says so, and earlier checkpoints remain."""
        try:
            work()
        except CheckpointError as error:
            self._saved_at = -1
            print(
                f"error: rank {self.context.rank} goes on without saving: {error}",
                file=sys.stderr,
                flush=True,
            )

    def _tell(self, iteration: int | None) -> None:
        if iteration is not None:
            self.monitor.message(f"saved a checkpoint at iteration {iteration}")

    def _due(self, interval: int | None, state: TrainState) -> bool:
        return interval is not None and state.iteration % interval == 0

    def _after_step(self, state: TrainState, stop: StopRequest, started: float) -> str | None:
        """Settle a checkpoint that all ranks have written, and return the reason to stop, or None.

        The result is the same on all ranks, no matter which of them got a signal, is late or still writes.
        """
        if state.iteration >= self.plan.horizon.end.iteration:
            return None
        limit = self.plan.exit_seconds
        late = limit is not None and time.monotonic() - started >= limit
        unsettled = self.checkpoints is not None and self.checkpoints.saver.unsettled
        writes = unsettled and self.checkpoints.saver.busy
        asked = [float(stop.requested), float(late), float(writes)]
        flags = torch.tensor(asked, device=self.context.device)
        self.context.world.all_reduce(flags, "max").wait()
        told, late, writes = flags.tolist()
        if unsettled and not writes:
            self._on_the_way(lambda: self._tell(self.checkpoints.saver.advance()))
        if told:
            return stop.reason or "another rank was asked to stop"
        if late:
            return f"--exit-duration-in-mins {limit / 60:g} is over"
        if self._due(self.plan.exit_interval, state):
            return f"--exit-interval {self.plan.exit_interval}"
        return None


def _steadiness(state: TrainState, result: StepResult) -> dict[str, float | None]:
    """The metrics of `state.stability` after a step that made an update."""
    found = state.stability
    if found is None or result.skipped or not found.updates:
        return {}
    return {
        "loss_ratio": found.loss_ratio,
        "loss_deviation": found.loss.deviation,
        "grad_norm_deviation": found.grad_norm.deviation,
    }
