"""Time training steps of jobs on the ranks of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megazero.config.derive import replicas_per_node
from megazero.config.tree.config import Config
from megazero.mpu.communicators import second_communicators
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch, close_groups, grid_of, open_context
from megazero.plan.job import PlannedJob
from megazero.plan.ranks import on_ranks
from megazero.train.build import build_model
from megazero.train.step.timers import Timers

_STEPS = 5


@dataclass(frozen=True)
class StepMeasurement:
    """Seconds of a step over several rounds: median, least and most."""

    seconds: float
    least: float
    most: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> StepMeasurement:
        """Summarize the seconds of each round."""
        return cls(statistics.median(rounds), min(rounds), max(rounds))


def measured_steps(
    configs: Sequence[Config], ranks: int, kind: str, rounds: int = 3
) -> list[StepMeasurement]:
    """Time a step of each job, in rounds, in each of which every job has a turn.

    Args:
        configs: the jobs, all on `ranks` ranks.
        ranks: processes on this machine.
        kind: the kind of device, ``cpu`` or ``cuda``.
        rounds: how often each job is built and makes a few steps.

    Raises:
        CommunicationError: a rank failed.
    """
    times: list[list[float]] = on_ranks(ranks, kind, partial(_measure, tuple(configs), rounds))
    return [StepMeasurement.of(own) for own in times]


def _measure(
    configs: Sequence[Config], rounds: int, launch: Launch, device: torch.device
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in configs]
    for _ in range(rounds):
        for own, config in zip(times, configs, strict=True):
            own.append(step_seconds(config, launch, device))
    return times


def step_seconds(config: Config, launch: Launch, device: torch.device) -> float:
    """Time a step of random samples: the median over a few steps after the first, on the slowest rank.

    All ranks of the joined world call this together.
    """
    apart = device.type == "cuda"
    job = PlannedJob(config, launch.world_size, apart, device=device.type)
    stage = config.zero.stage
    context = open_context(
        config.parallel,
        launch,
        device,
        node_size=replicas_per_node(config.zero),
        seconds=second_communicators(grid_of(config.parallel, launch.world_size), stage) if apart else (),
    )
    try:
        return _step_seconds(job, context, device)
    finally:
        close_groups(context)


def _step_seconds(job: PlannedJob, context: ParallelContext, device: torch.device) -> float:
    engine = build_model(job.vocabulary, context, job.config, job.training_plan)
    batches, times = job.batches(context, job.micro_batches), []
    for _ in range(_STEPS + 1):
        context.world.barrier()
        began = time.perf_counter()
        engine.train_step(batches, job.step.before, Timers())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = torch.tensor([time.perf_counter() - began], device=device)
        context.world.all_reduce(taken, "max")
        times.append(float(taken))
    return statistics.median(times[1:])
