"""The reports of the engine for a user's module: lines on standard output, and monitors."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megazero.account.profilers.flops.counter import PRODUCTS
from megazero.config.tree.config import Config
from megazero.deepspeed.checkpoint.saved import EngineCounters
from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.reports.profiling import FlopsProfiler
from megazero.deepspeed.reports.timer import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_MICRO_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
    STEP_GLOBAL_TIMER,
    STEP_MICRO_TIMER,
    SynchronizedWallClockTimer,
    ThroughputTimer,
)
from megazero.loss import LossTerm
from megazero.mpu.context import ParallelContext
from megazero.mpu.traffic import TrafficLog
from megazero.train.observe.metrics import StepMetrics
from megazero.train.observe.monitors.base import CompositeMonitor, Monitor
from megazero.train.observe.monitors.csv_file import CsvMonitor
from megazero.train.observe.monitors.tensorboard import TensorBoardMonitor
from megazero.train.observe.monitors.weights_and_biases import WandbMonitor
from megazero.train.step.losses import Losses
from megazero.train.step.timers import Timers

# Phase -> the timer of its last run, and that of all since the last report.
_CLOCKS = MappingProxyType(
    {
        "forward": (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER),
        "backward": (BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER),
        "step": (STEP_MICRO_TIMER, STEP_GLOBAL_TIMER),
    }
)


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step, as an engine knows it.

    Attributes:
        counters: how far the engine has come with it.
        loss: the mean over the step's samples; None if the script ran each backward itself.
        grad_norm: the gradient norm before clipping.
        rates: the learning rate of each parameter group.
        loss_scale: the loss scale that the step used.
        applied: whether this step updated the weights.
    """

    counters: EngineCounters
    loss: float | None
    grad_norm: float
    rates: tuple[float, ...]
    loss_scale: float
    applied: bool

    @property
    def step(self) -> int:
        """Its number, from 1."""
        return self.counters.global_steps


class _Unwaited:
    """The settings of the engine's throughput timer, which does not wait for the device."""

    enabled, synchronized = True, False


class Reporter:
    """Prints a line every `steps_per_print` steps on the first rank and feeds the JSON's monitors.

    Times are means over the steps since the last report.

    Attributes:
        timers: time the phases forward, backward and step.
        clocks: the same under DeepSpeed's names, with `wall_clock_breakdown`, for scripts to ask.
        settings: the settings, which say what to report.
        monitor: takes a script's own values.
        tput_timer: the samples per second so far.
        profiler: the FLOPs of the step that `flops_profiler` names, once it has come; else None.

    Args:
        settings: the settings, which say what to report.
        context: the ranks; the first one prints.
        traffic: counts the collectives, or None.
    """

    def __init__(self, settings: UserSettings, context: ParallelContext, traffic: TrafficLog | None):
        self.timers = Timers(context.device, synchronize=settings.logging.wall_clock_breakdown)
        self.clocks = SynchronizedWallClockTimer()
        self.settings = settings
        self._speaks = context.rank == 0
        self._traffic = traffic
        self._monitor = CompositeMonitor(_monitors(settings) if self._speaks else ())
        self.tput_timer = ThroughputTimer(_Unwaited, settings.batch.train)
        logging = settings.logging
        self._records = any((logging.tensorboard_dir, logging.csv_dir, logging.wandb_project))
        self.monitor = EventMonitor(self._monitor, enabled=self._records)
        self._flops = 0
        self._profiled = False
        self.profiler: FlopsProfiler | None = None
        self._counted = not settings.profiling.flops_profiler
        self.restart(0)
        if self._speaks and settings.extras.dump_state:
            self._say(f"configuration: {settings}")

    def wants(self, step: int) -> bool:
        """Whether `step` will be reported; the same on every rank."""
        return self._records or self._prints(step)

    def _prints(self, step: int) -> bool:
        every: float | None = self.settings.extras.steps_per_print
        return every is not None and step % every == 0

    def step(self, facts: StepFacts) -> None:
        """Report a step for which `wants` was true; only the first rank prints."""
        steps = facts.step - self._since
        phases = {name: spent / steps for name, spent in self.timers.collect().items()}
        seconds = (time.perf_counter() - self._clock) / steps
        self.restart(facts.step)
        self._counted = True
        if not self._speaks:
            return
        self._monitor.step(_metrics(facts, self.settings, phases, seconds, self._flops))
        if self._prints(facts.step):
            self._say(self._line(facts, phases, seconds))

    def restart(self, step: int) -> None:
        """Set the number of steps done so far; time is counted from here."""
        self.timers.collect()
        for _, name in _CLOCKS.values():
            self.clocks(name).reset()
        self._since, self._clock = step, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as forward, backward or step."""
        micro, whole = map(self.clocks, _CLOCKS[name])
        timed = self.settings.logging.wall_clock_breakdown
        if timed:
            micro.start()
            whole.start()
        try:
            with self.timers(name):
                yield
        finally:
            if timed:
                micro.stop(reset=True)
                whole.stop()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the body's FLOPs towards a step's, until the first report."""
        if self._counted:
            yield
            return
        with FlopCounterMode(display=False, custom_mapping=dict(PRODUCTS)) as counter:
            yield
        self._flops += counter.get_total_flops()

    @contextmanager
    def profiling(self, module: nn.Module, step: int) -> Iterator[None]:
        """Profile the forwards in the body in the step that `flops_profiler` names; the first rank prints."""
        wanted = self.settings.profiling
        if not wanted.flops_profiler or self._profiled or step < wanted.flops_profiler_step:
            yield
            return
        self._profiled = True
        profiler = FlopsProfiler(module, recompute_fwd_factor=wanted.flops_profiler_recompute_fwd_factor)
        self.profiler = profiler
        profiler.start_profile()
        try:
            yield
        finally:
            profiler.stop_profile()
        if self._speaks:
            profiler.print_model_profile(
                step,
                wanted.flops_profiler_module_depth,
                wanted.flops_profiler_top_modules,
                wanted.flops_profiler_detailed,
                wanted.flops_profiler_output_file,
            )

    def _line(self, facts: StepFacts, phases: Mapping[str, float], seconds: float) -> str:
        batch = self.settings.batch.train
        parts = [
            f"step {facts.step}",
            f"samples {facts.counters.global_samples}",
            "" if facts.loss is None else f"loss {facts.loss:.6g}",
            f"grad norm {facts.grad_norm:.4g}",
            f"learning rate {', '.join(f'{rate:.4g}' for rate in facts.rates)}",
            f"loss scale {facts.loss_scale:g}",
            f"skipped {facts.counters.skipped_steps}",
            f"{batch / seconds:.1f} samples/s" if seconds > 0 else "",
        ]
        if self.settings.logging.wall_clock_breakdown:
            parts += [f"{name} {1000 * spent:.1f} ms" for name, spent in phases.items()]
        if self._flops:
            parts.append(f"{self._flops:.3e} FLOPs per step and rank")
            parts.append(f"{self._flops / seconds / 1e12:.3f} TFLOP/s per rank")
        if self._traffic is not None:
            parts += [
                f"{group} {operation}: {calls} calls, {self._traffic.payload[group, operation]} bytes"
                for (group, operation), calls in sorted(self._traffic.calls.items())
            ]
        return " | ".join(part for part in parts if part)

    def _say(self, text: str) -> None:
        print(text, flush=True)


class EventMonitor:
    """The engine's `monitor`, to which a script writes values of its own.

    Args:
        monitor: the monitors of the JSON.
        enabled: whether there is any, on some rank.
    """

    def __init__(self, monitor: Monitor, *, enabled: bool):
        self.enabled = enabled
        self._monitor = monitor
        self._close = weakref.finalize(self, monitor.close)

    def close(self) -> None:
        """Write out what is pending and end the records; otherwise the end of the process does."""
        self._close()

    def write_events(self, event_list: Iterable[tuple[str, float, int]], flush: bool = True) -> None:
        """Record ``(tag, value, step)`` each; only the first rank does.

        Args:
            event_list: the values.
            flush: without effect; the monitors decide when they write.
        """
        for tag, value, step in event_list:
            self._monitor.step(_Event(tag, float(value), int(step)))


class _Event(StepMetrics):
    """One value of a script, in place of a step's metrics."""

    def __init__(self, tag: str, value: float, step: int):
        super().__init__(iteration=step)
        self._chart = {tag: value}

    def charts(self, *, with_timers: bool) -> dict[str, float]:
        return self._chart

    def tags_over_samples(self) -> set[str]:
        return set()


def _monitors(settings: UserSettings) -> Iterator[Monitor]:
    logging = settings.logging
    if logging.tensorboard_dir is not None:
        yield TensorBoardMonitor(logging)
    if logging.csv_dir is not None:
        yield CsvMonitor(logging.csv_dir, with_timers=logging.wall_clock_breakdown)
    if logging.wandb_project is not None:
        sections = {"zero": settings.zero, "precision": settings.precision, "logging": logging}
        yield WandbMonitor(Config.model_construct(set(sections), **sections))


def _metrics(
    facts: StepFacts, settings: UserSettings, phases: Mapping[str, float], seconds: float, flops: int
) -> StepMetrics:
    """The metrics for monitors. An engine cannot tell tokens from other inputs, so token counts are 0."""
    return StepMetrics(
        iteration=facts.step,
        consumed_samples=facts.counters.global_samples,
        consumed_tokens=0,
        losses=Losses((LossTerm("lm"),), (math.nan if facts.loss is None else facts.loss,)),
        grad_norm=facts.grad_norm,
        learning_rate=facts.rates[0],
        loss_scale=facts.loss_scale,
        skipped=not facts.applied,
        seconds=seconds,
        tokens_per_second=0.0,
        tflops=flops / seconds / 1e12 if seconds > 0 else 0.0,
        matmul_share=0.0,
        global_batch_size=settings.batch.train,
        num_micro_batches=settings.batch.accumulation,
        phase_seconds=dict(phases),
    )
