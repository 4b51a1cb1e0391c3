"""Measures the steps of a run: their time, waits, memory, and the traffic of offloaded state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from megazero.account.memory import MemoryMeter
from megazero.account.profiler import Profiler, TokenCount
from megazero.config.difficulties import Difficulties
from megazero.config.steps import Step
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree.config import Config
from megazero.layers.inputs import NOTHING_SKIPPED, Skipping
from megazero.mpu.host_waits import host_waits
from megazero.mpu.messages import fold_values
from megazero.mpu.waits import Waits
from megazero.train.observe.peak import Peak
from megazero.train.observe.stragglers import Stragglers
from megazero.train.step.engine import Engine, Outcome, StepResult
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.zero.store.store import offloaded_bytes, traffic
from megazero.zero.store.tier import Traffic


class StepWaits:
    """Reports each place in the code that makes the host wait for the device, once.

    It skips the first step, which allocates, opens communicators and may compile.

    Args:
        mode: whether to ignore such a wait, report it, or raise an error.
        say: receives a line for each place.
    """

    def __init__(
        self, mode: Literal["off", "warn", "error"], device: torch.device, say: Callable[[str], None]
    ):
        self.mode = mode
        self.device = device
        self.say = say
        self._began = False
        self._reported: set[tuple[str, str]] = set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the block.

        Raises:
            HostWaitError: in mode ``error``, at the first wait.
        """
        if self.mode == "off" or not self._began:
            self._began = True
            yield
            return
        with host_waits(self.device, refuses=self.mode == "error") as waits:
            yield
        for where, what in waits:
            if (where, what) not in self._reported:
                self._reported.add((where, what))
                self.say(f"host waits | {where} {what}")


class Meters:
    """Measures the steps of a run.

    Args:
        flops_per_token: (sequence length, what the step skips) -> FLOPs of forward and backward per token,
            without a teacher's.
        matmul_rate: this rank's measured matmul rate, FLOP/s.

    Attributes:
        first_step: the memory meter of the latest step, if that is the first one and metrics go to a file.
        peaks: the largest values of a step, by the names of the metrics that watch for them.
    """

    def __init__(
        self,
        config: Config,
        plan: TrainingPlan,
        engine: Engine,
        flops_per_token: TokenCount,
        matmul_rate: float,
        say: Callable[[str], None],
        profiler: Profiler,
    ):
        context = engine.context
        self.config = config
        self.plan = plan
        self.engine = engine
        self.flops_per_token = flops_per_token
        self.matmul_rate = matmul_rate
        self.difficulties = Difficulties.of(config.data_sampling)
        waits = config.logging.log_timers_to_tensorboard
        self.timers = Timers(context.device, synchronize=waits, ended=profiler.phase_ends)
        self.profiler = profiler
        self.stragglers = Stragglers(config.logging.straggler_interval or None, context)
        self.peaks: dict[str, Peak] = {}
        self._before = Traffic()
        self.first_step: MemoryMeter | None = None
        self._memory = (
            MemoryMeter.of(engine.optimizer.store, engine.executor)
            if config.logging.metrics_jsonl is not None or config.checkpoint.save is not None
            else None
        )
        self._waits = Waits(context.device) if context.watch is None else context.watch.waits
        self._host_waits = StepWaits(config.guards.check_host_waits, context.device, say)
        self._offloads = bool(offloaded_bytes(engine.optimizer.store))
        self._began = 0.0

    def begin(self) -> None:
        """Begin to measure a step."""
        self._began = time.perf_counter()
        self._waits.start_step()

    @contextmanager
    def over_work(self) -> Iterator[None]:
        """Measure the block, which computes the step after its samples have been read."""
        self._before = traffic(self.engine.optimizer.store)
        self.first_step, self._memory = self._memory, None
        meter = self.first_step
        with self._host_waits.step(), nullcontext() if meter is None else meter.over_a_step():
            yield

    @property
    def moved(self) -> Traffic | None:
        """Traffic of offloaded state during the step's computation; None without offload."""
        return traffic(self.engine.optimizer.store) - self._before if self._offloads else None

    @property
    def seconds(self) -> float:
        """Wall time since the step began."""
        return time.perf_counter() - self._began

    def tokens_per_expert(self, result: StepResult) -> list[dict[str, object]] | None:
        """Gather the choices of each expert from all stages; None without experts or if the step was held."""
        if result.outcome is Outcome.HELD:
            return None
        return self.engine.loads.report(result.tokens)

    def memory_of_first_step(self) -> list[Mapping[str, Mapping[str, int]]] | None:
        """Gather the memory of every rank if the latest step is the first one; every rank calls this.

        Returns:
            The sizes of all ranks on the first rank; None on the others, and after later steps.
        """
        if self.first_step is None:
            return None
        context = self.engine.context
        sizes: list[Mapping[str, Mapping[str, int]]] | None = fold_values(
            context.world, [self.first_step.sizes()], lambda some, others: some + others, context.device
        )
        return sizes

    def end(self, data_seconds: float, *, made: bool) -> None:
        """End the measurement of a step that was `made`, or passed over; reading took `data_seconds`."""
        waited = self._waits.end_step()
        if made:
            self.stragglers.add(self.seconds, data_seconds, waited)


@dataclass(frozen=True)
class StepFacts:
    """A step and its measurements, from which its metrics are computed.

    Attributes:
        meters: measured the step; have the run's configuration, plan and engine.
        state: the progress of the run, this step included.
        step: the step's place in the plan: its samples and sizes.
        result: the result of the step.
        seconds: its wall time.
    """

    meters: Meters
    state: TrainState
    step: Step
    result: StepResult
    seconds: float = 0.0

    @cached_property
    def skipping(self) -> Skipping:
        """The tokens and layers that the step skipped."""
        if self.result.outcome is Outcome.PASSED_OVER:
            return NOTHING_SKIPPED
        return self.meters.engine.schedules.skipping.at(self.step.before)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks, padding and skipped tokens included."""
        return self.step.positions / self.seconds

    @cached_property
    def flops(self) -> float:
        """Model FLOP/s of this rank, without padding, which is no useful work."""
        engine = self.meters.engine
        per_token = self.meters.flops_per_token(self.step.sequence_length, self.skipping)
        per_token += engine.distillation.flops_per_token
        used = self.tokens_per_second * (1.0 - self.result.losses.padding)
        return used * (per_token / engine.context.world_size)
