"""Reports of an engine's steps: a line on standard output, and the monitors of the JSON."""

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
from megazero.train.observe.news.services import trackers_of
from megazero.train.step.losses import Losses
from megazero.train.step.timers import Timers

# Phase -> the timer of its last run, and the timer of all its runs since the last report.
_CLOCKS = MappingProxyType(
    {
        "forward": (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER),
        "backward": (BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER),
        "step": (STEP_MICRO_TIMER, STEP_GLOBAL_TIMER),
    }
)


@dataclass(frozen=True)
class EngineStep:
    """One optimizer step of an engine, to report.

    Attributes:
        counters: the engine's counters after the step.
        loss: the mean over the step's samples; None if the script ran each backward itself.
        grad_norm: the gradient norm before clipping.
        rates: the learning rate of each parameter group.
        loss_scale: the loss scale that the step used.
        applied: whether the step updated the weights.
    """

    counters: EngineCounters
    loss: float | None
    grad_norm: float
    rates: tuple[float, ...]
    loss_scale: float
    applied: bool

    @property
    def step(self) -> int:
        """The step's number, from 1."""
        return self.counters.global_steps


class _Unwaited:
    """Settings of the engine's throughput timer: it does not synchronize with the device."""

    enabled, synchronized = True, False


class Reporter:
    """Prints a line every `steps_per_print` steps on the first rank and feeds the JSON's monitors.

    Times are means over the steps since the last report.

    Attributes:
        timers: time the phases forward, backward and step.
        clocks: DeepSpeed's timers of the same phases, for scripts; they run with `wall_clock_breakdown`.
        monitor: records a script's own values.
        tput_timer: measures samples per second.
        profiler: the profile of the step that the JSON's `flops_profiler` names; None before that step.

    Args:
        settings: the engine's settings, which choose what is reported.
        context: the rank's groups; rank 0 prints.
        traffic: counts the collectives; None without `comms_logger`.
    """

    def __init__(self, settings: UserSettings, context: ParallelContext, traffic: TrafficLog | None):
        self.timers = Timers(context.device, synchronize=settings.logging.wall_clock_breakdown)
        self.clocks = SynchronizedWallClockTimer()
        self.settings = settings
        self._prints_here = context.rank == 0
        self._traffic = traffic
        self._monitor = CompositeMonitor(_monitors(settings) if self._prints_here else ())
        self.tput_timer = ThroughputTimer(_Unwaited, settings.batch.train)
        logging = settings.logging
        self._records = any((logging.tensorboard_dir, logging.csv_dir, *trackers_of(logging)))
        self.monitor = EventMonitor(self._monitor, enabled=self._records)
        self._flops = 0
        self._profiled = False
        self.profiler: FlopsProfiler | None = None
        self._counted = not settings.profiling.flops_profiler
        self.restart(0)
        if self._prints_here and settings.extras.dump_state:
            print(f"configuration: {settings}", flush=True)

    def wants(self, step: int) -> bool:
        """Whether `step` will be reported; all ranks agree."""
        return self._records or self._prints(step)

    def _prints(self, step: int) -> bool:
        every: float | None = self.settings.extras.steps_per_print
        return every is not None and step % every == 0

    def step(self, done: EngineStep) -> None:
        """Report a step for which `wants` was true; rank 0 prints and feeds the monitors."""
        steps = done.step - self._since
        phases = {name: spent / steps for name, spent in self.timers.collect().items()}
        seconds = (time.perf_counter() - self._clock) / steps
        self.restart(done.step)
        self._counted = True
        if not self._prints_here:
            return
        self._monitor.step(_metrics(done, self.settings, phases, seconds, self._flops))
        if self._prints(done.step):
            print(self._line(done, phases, seconds), flush=True)

    def restart(self, step: int) -> None:
        """Set the number of steps done so far, and start timing from now."""
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
        """Add the body's FLOPs to the FLOPs per step; after the first report nothing is counted any more."""
        if self._counted:
            yield
            return
        with FlopCounterMode(display=False, custom_mapping=dict(PRODUCTS)) as counter:
            yield
        self._flops += counter.get_total_flops()

    @contextmanager
    def profiling(self, module: nn.Module, step: int) -> Iterator[None]:
        """Profile the body if `step` is the one that the JSON's `flops_profiler` names; rank 0 prints."""
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
        if self._prints_here:
            profiler.print_model_profile(
                step,
                wanted.flops_profiler_module_depth,
                wanted.flops_profiler_top_modules,
                wanted.flops_profiler_detailed,
                wanted.flops_profiler_output_file,
            )

    def _line(self, done: EngineStep, phases: Mapping[str, float], seconds: float) -> str:
        batch = self.settings.batch.train
        parts = [
            f"step {done.step}",
            f"samples {done.counters.global_samples}",
            "" if done.loss is None else f"loss {done.loss:.6g}",
            f"grad norm {done.grad_norm:.4g}",
            f"learning rate {', '.join(f'{rate:.4g}' for rate in done.rates)}",
            f"loss scale {done.loss_scale:g}",
            f"skipped {done.counters.skipped_steps}",
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


class EventMonitor:
    """The engine's `monitor`: records the values that a script writes.

    Args:
        monitor: the monitors of the JSON; it has none on ranks other than 0.
        enabled: whether the JSON configures a monitor.
    """

    def __init__(self, monitor: Monitor, *, enabled: bool):
        self.enabled = enabled
        self._monitor = monitor
        self._close = weakref.finalize(self, monitor.close)

    def close(self) -> None:
        """Flush and close the monitors; without this call they close when the process ends."""
        self._close()

    def write_events(self, event_list: Iterable[tuple[str, float, int]], flush: bool = True) -> None:
        """Record values; only rank 0 does.

        Args:
            event_list: triples ``(tag, value, step)``.
            flush: has no effect; the monitors decide when they write.
        """
        for tag, value, step in event_list:
            self._monitor.step(_ScriptValue(tag, float(value), int(step)))


class _ScriptValue(StepMetrics):
    """One value of a script, in the form of a step's metrics, which monitors take."""

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
    sections = {"zero": settings.zero, "precision": settings.precision, "logging": logging}
    yield from (kind(Config.model_construct(set(sections), **sections)) for kind in trackers_of(logging))


def _metrics(
    done: EngineStep, settings: UserSettings, phases: Mapping[str, float], seconds: float, flops: int
) -> StepMetrics:
    """The metrics for monitors; token counts are 0, as an engine cannot tell tokens from other inputs."""
    return StepMetrics(
        iteration=done.step,
        consumed_samples=done.counters.global_samples,
        consumed_tokens=0,
        losses=Losses((LossTerm("lm"),), (math.nan if done.loss is None else done.loss,)),
        grad_norm=done.grad_norm,
        learning_rate=done.rates[0],
        loss_scale=done.loss_scale,
        skipped=not done.applied,
        seconds=seconds,
        tokens_per_second=0.0,
        tflops=flops / seconds / 1e12 if seconds > 0 else 0.0,
        matmul_share=0.0,
        global_batch_size=settings.batch.train,
        num_micro_batches=settings.batch.accumulation,
        phase_seconds=dict(phases),
    )
