"""DeepSpeed's timers: named timers of work on the device, and the rate of samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from megazero.account.profilers.clock import ClockPoint, clock_of
from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.deepspeed.accelerator.cpu import Accelerator
from megazero.deepspeed.reports.logging import logger, print_dist
from megazero.errors import ConfigError

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without `trim_percent` of the values at either end; 0 if `data` is empty."""
    if not 0.0 <= trim_percent < 0.5:
        raise ConfigError(f"`trim_percent` must be from 0 to below 0.5, but is {trim_percent}; lower it")
    cut = round(len(data) * trim_percent)
    return fmean(sorted(data)[cut : len(data) - cut]) if data else 0.0


class Timer:
    """Adds up the times between `start` and `stop`, by the device's own clock.

    Args:
        name: the name, for errors.
    """

    def __init__(self, name: str):
        self.name_ = name
        self.started_ = False
        self._clock = clock_of(get_accelerator().device())
        self._start: ClockPoint = None
        self._spans: list[tuple[ClockPoint, ClockPoint]] = []

    def start(self) -> None:
        """Start to measure.

        Raises:
            ConfigError: the timer is running.
        """
        if self.started_:
            raise ConfigError(f"`{self.name_}` must be stopped before it is started again; call `stop`")
        self.started_, self._start = True, self._clock.now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Add the time since `start`; with `reset`, remove all earlier times.

        Raises:
            ConfigError: the timer is not running.
        """
        if not self.started_:
            raise ConfigError(f"`{self.name_}` must be started before it is stopped; call `start`")
        if reset:
            self._spans.clear()
        self.started_ = False
        self._spans.append((self._start, self._clock.now()))

    def reset(self) -> None:
        """Stop and remove all times."""
        self.started_ = False
        self._spans.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the total milliseconds so far; a running timer continues to run."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._milliseconds())
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean time in milliseconds, without the tenth at either end."""
        return trim_mean(self._milliseconds(), 0.1)

    def _milliseconds(self) -> list[float]:
        get_accelerator().synchronize()
        return [1000.0 * self._clock.seconds(start, end) for start, end in self._spans]


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("step").start()``."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def get_timers(self) -> dict[str, Timer]:
        """Return the timers by name."""
        return self.timers

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """Return a line with the device's memory."""
        device = get_accelerator()
        amounts = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_reserved(),
            "max_cache_allocated": device.max_memory_reserved(),
        }
        return "".join(f" | {name}: {size / 2**30:.4f} GB" for name, size in amounts.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print these timers' milliseconds, divided by `normalizer`, on the first rank or on `ranks`."""
        times = {name: self.timers[name].elapsed(reset) for name in names if name in self.timers}
        line = "".join(f" | {name}: {time_ / normalizer:.2f}" for name, time_ in times.items())
        memory = self.memory_usage() if memory_breakdown else ""
        print_dist(f"time (ms){line}{memory}", ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of these timers, divided by `normalizer`."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class NoopTimer:
    """Has the methods of timers and does nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def get_timers(self) -> dict[str, Timer]:
        """Return no timers."""
        return {}

    def start(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    stop = reset = log = get_mean = start

    def elapsed(self, **kwargs: bool) -> float:
        """Return 0."""
        return 0

    mean = elapsed


SynchronizedWallClockTimer.Timer = Timer  # type: ignore[attr-defined]  # the name under which scripts know it


class ThroughputTimer:
    """Measures the samples per second of a training loop.

    Attributes:
        initialized, started: whether a micro-step was ever started, and whether one is running.
        start_time, end_time: the start and the end of the last measured micro-step, in seconds; 0 before.

    Args:
        config: has `enabled`, and `synchronized`: whether to synchronize the device for each time.
        batch_size: the number of samples in a step.
        start_step: the number of warm-up steps, which are not measured.
        steps_per_output: the number of steps between log lines; None logs nothing.
        monitor_memory: whether log lines contain the host's memory usage.
        logging_fn: logs a line; by default the logger at level info.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ):
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.initialized = self.started = False
        self.start_time = self.end_time = 0.0
        self._counted = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start a micro-step."""
        if self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step, and a step if `global_step`."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:
            return
        self.end_time = self._now()
        duration = self.end_time - self.start_time
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if global_step:
            self._counted += 1
            boundary = self.steps_per_output and self.global_step_count % self.steps_per_output == 0
            if report_speed and boundary:
                self.logging(self._line())
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the mean rate since the warm-up; minus infinity during it."""
        if not self._counted:
            return float("-inf")
        return self.batch_size * self._counted / max(self.total_elapsed_time, TIME_EPSILON)

    def _line(self) -> str:
        device = get_accelerator()
        memory = ""
        if self.monitor_memory:
            host = Accelerator()
            memory = f", vm %: {100 * (1 - host.available_memory() / host.total_memory()):.1f}"
        return (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
            f", RunningAvgSamplesPerSec={self.avg_samples_per_sec()}"
            f", CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + TIME_EPSILON)}"
            f", MemAllocated={device.memory_allocated() / 2**30:.2f}GB"
            f", MaxMemAllocated={device.max_memory_allocated() / 2**30:.2f}GB{memory}"
        )

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()
