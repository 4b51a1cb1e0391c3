"""The plan of a run: its steps, what happens between them, and where its samples come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megazero.config.difficulties import Difficulties
from megazero.config.guards import GuardsConfig
from megazero.config.training_plan import TrainingPlan
from megazero.layers import Skipping


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, in numbers.

    Attributes:
        training_plan: where training stops, the size of each step, and what evaluations read.
        flops_per_token: (tokens of a sequence, what the step skips) -> FLOPs of forward and backward for one
            of them, without a teacher's.
        matmul_rate: this rank's measured matmul rate, FLOP/s.
        save_interval: iterations between checkpoints, or None.
        exit_interval: stop at multiples of this many iterations, or None.
        exit_seconds: stop after this many seconds, or None.
        guards: the faults to look for while training, and what to do about each.
        stability: number of updates over which stability is reported, or None.
        log_params_norm, log_num_zeros: whether steps report these.
        exact_timers: whether to wait for the device at both ends of each timed phase.
        log_interval: iterations between reports of what each expert got.
        straggler_interval: iterations after which ranks are compared for being slow, or None.
        measures_memory: whether the first step measures what memory holds.
        difficulties: how difficult the samples of each step may be; None without a curriculum over samples.
    """

    training_plan: TrainingPlan
    flops_per_token: Callable[[int, Skipping], float]
    matmul_rate: float
    save_interval: int | None = None
    exit_interval: int | None = None
    exit_seconds: float | None = None
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    stability: int | None = None
    log_params_norm: bool = False
    log_num_zeros: bool = False
    exact_timers: bool = False
    log_interval: int = 1
    straggler_interval: int | None = None
    measures_memory: bool = False
    difficulties: Difficulties | None = None
