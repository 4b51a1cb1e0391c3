"""The training loop: steps, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megazero.config.derive import BatchRamp
from megazero.mpu import ParallelContext
from megazero.train.engine import Engine, StepResult
from megazero.train.feed import Feed
from megazero.train.metrics import EvalMetrics, StepMetrics
from megazero.train.monitors import Monitor
from megazero.train.signals import StopRequest
from megazero.train.state import TrainState
from megazero.train.timers import Timers


@dataclass(frozen=True)
class Plan:
    """What a run will do, in numbers.

    Attributes:
        iterations: where training stops.
        ramp: global batch size over the training.
        sequence_length: tokens per sample.
        flops_per_token: of forward and backward.
        matmul_rate: this rank's measured matmul rate, FLOP/s.
        eval_interval, eval_iters: when to evaluate and over how many global batches.
        save_interval: iterations between checkpoints, or None.
        exit_interval: stop at multiples of this, or None.
        exit_seconds: stop after this time, or None.
        log_params_norm, log_num_zeros: whether steps report these.
        exact_timers: wait for the device at both ends of each timed phase.
    """

    iterations: int
    ramp: BatchRamp
    sequence_length: int
    flops_per_token: float
    matmul_rate: float
    eval_interval: int
    eval_iters: int
    save_interval: int | None = None
    exit_interval: int | None = None
    exit_seconds: float | None = None
    log_params_norm: bool = False
    log_num_zeros: bool = False
    exact_timers: bool = False


@dataclass(frozen=True)
class Feeds:
    """Where samples come from; a split without data is None."""

    train: Feed | None
    valid: Feed | None
    test: Feed | None


class Loop:
    """Runs a training to its end or to a reason to stop.

    Args:
        engine: makes steps.
        plan: how many, and what happens between them.
        feeds: samples of each split.
        monitor: told of everything.
        save: writes a checkpoint of a state; None where nothing is saved.
        context: for agreeing on when to stop.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        feeds: Feeds,
        monitor: Monitor,
        save: Callable[[TrainState], None] | None,
        context: ParallelContext,
    ):
        self.engine = engine
        self.plan = plan
        self.feeds = feeds
        self.monitor = monitor
        self.save = save
        self.context = context
        self.timers = Timers(context.device, synchronize=plan.exact_timers)

    def fit(self, state: TrainState) -> TrainState:
        """Train from `state` on; returns the state at the end. A SIGTERM saves and ends it early."""
        started = time.monotonic()
        saved_at = evaluated_at = state.iteration
        with StopRequest() as stop:
            while state.iteration < self.plan.iterations:
                state = self._step(state)
                if self._due(self.plan.eval_interval, state) and self.feeds.valid is not None:
                    self.evaluate("validation", state)
                    evaluated_at = state.iteration
                reason = self._reason_to_stop(state, stop, started)
                if self.save is not None and (reason or self._due(self.plan.save_interval, state)):
                    self._save(state)
                    saved_at = state.iteration
                if reason:
                    self.monitor.message(f"stopping after iteration {state.iteration}: {reason}")
                    return state
        if self.save is not None and saved_at < state.iteration:
            self._save(state)
        if self.feeds.valid is not None and evaluated_at < state.iteration:
            self.evaluate("validation", state)
        if self.feeds.test is not None:
            self.evaluate("test", state)
        return state

    def evaluate(self, split: str, state: TrainState) -> float:
        """Mean loss over the split's next `eval_iters` global batches, in nats; training is untouched."""
        feed = self.feeds.valid if split == "validation" else self.feeds.test
        size = self.plan.ramp.final
        # Each evaluation reads the next part of the validation data, as Megatron-LM's do.
        past = state.iteration // self.plan.eval_interval if split == "validation" else 0
        past -= 1 if past and state.iteration % self.plan.eval_interval == 0 else 0
        start = past * self.plan.eval_iters * size
        count = size // feed.spec.stride

        def batches():
            for i in range(self.plan.eval_iters):
                yield feed.micro_batches(start + i * size, count)

        began = time.perf_counter()
        with self.timers("evaluation"):
            loss, tokens = self.engine.evaluate(batches())
        self.monitor.evaluation(
            EvalMetrics(
                iteration=state.iteration,
                split=split,
                lm_loss=loss,
                consumed_samples=state.consumed_samples,
                consumed_tokens=state.consumed_tokens,
                num_tokens=tokens,
                seconds=time.perf_counter() - began,
            )
        )
        return loss

    def _step(self, state: TrainState) -> TrainState:
        began = time.perf_counter()
        size = self.plan.ramp.at(state.consumed_samples)
        count = size // self.feeds.train.spec.stride
        tokens = size * self.plan.sequence_length
        with self.timers("data"):
            batches = self.feeds.train.micro_batches(state.consumed_samples, count)
        result = self.engine.train_step(batches, tokens, state.progress, self.timers)
        state = state.after(size, tokens, result.skipped)
        # The norms are collective, so every rank computes them; the monitor only shows them.
        optimizer = self.engine.optimizer
        extras = {
            "params_norm": optimizer.params_norm() if self.plan.log_params_norm else None,
            "num_zeros": optimizer.count_zero_grads() if self.plan.log_num_zeros else None,
        }
        seconds = time.perf_counter() - began
        self.monitor.step(self._metrics(state, result, size, count, seconds, extras))
        return state

    def _metrics(
        self, state: TrainState, result: StepResult, size: int, count: int, seconds: float, extras: dict
    ) -> StepMetrics:
        rate = size * self.plan.sequence_length / seconds
        flops = rate * self.plan.flops_per_token / self.context.world_size
        return StepMetrics(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            lm_loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            seconds=seconds,
            tokens_per_second=rate,
            tflops=flops / 1e12,
            matmul_share=flops / self.plan.matmul_rate,
            global_batch_size=size,
            num_micro_batches=count,
            first_bad_parameter=result.first_bad_parameter,
            phase_seconds=self.timers.collect(),
            **extras,
        )

    def _save(self, state: TrainState) -> None:
        with self.timers("save"):
            self.save(state)
        self.monitor.message(f"saved a checkpoint at iteration {state.iteration}")

    def _due(self, interval: int | None, state: TrainState) -> bool:
        return interval is not None and state.iteration % interval == 0

    def _reason_to_stop(self, state: TrainState, stop: StopRequest, started: float) -> str | None:
        """The same answer on all ranks, whichever of them was told or is late."""
        if state.iteration >= self.plan.iterations:
            return None
        limit = self.plan.exit_seconds
        late = limit is not None and time.monotonic() - started >= limit
        asked = torch.tensor([float(stop.requested), float(late)], device=self.context.device)
        self.context.world.all_reduce(asked, "max").wait()
        told, late = asked.tolist()
        if told:
            return stop.reason or "another rank was asked to stop"
        if late:
            return f"--exit-duration-in-mins {limit / 60:g} is over"
        if self._due(self.plan.exit_interval, state):
            return f"--exit-interval {self.plan.exit_interval}"
        return None
