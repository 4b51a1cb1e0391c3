"""A plan as text, tables and JSON: memory, traffic, times, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megazero.account.memory import KINDS
from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.mpu.grid import layout_words
from megazero.plan.device import Device
from megazero.plan.job import PlannedJob
from megazero.plan.plan import Plan, Say
from megazero.plan.prices import Prices
from megazero.plan.stage import StagePlan
from megazero.plan.times import StepTimes
from megazero.plan.training import Model, training_seconds
from megazero.plan.words import many, money, runs, shown, time_text
from megazero.train.parts.chunks import DTYPES

_LARGE_BUBBLE, _TIGHT, _UNEVEN = 0.15, 0.95, 1.15
_MOST_ROWS = 6
_LEAST_SHOWN = 1e-4  # of the largest payload
COLUMNS = ("stage", "ranks", *KINDS, "sum", "of")


@dataclass(frozen=True, eq=False)
class PlanReport:
    """A plan on a device, with `per_node` ranks on a node; an hour of a device costs `price`, if known."""

    plan: Plan
    device: Device
    per_node: int
    price: float | None = None

    @cached_property
    def times(self) -> StepTimes:
        """The times of the planned step."""
        return StepTimes.of(self.plan.stages, Prices(self.device, self.per_node))

    @cached_property
    def model(self) -> Model:
        """The model."""
        return Model.of(self.plan.job)

    @property
    def fits(self) -> bool:
        """Whether every rank's device has enough memory."""
        return self.plan.fullest.device_bytes <= self.device.allocator_bytes

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of matrix products."""
        return str(DTYPES[self.plan.job.config.precision.dtype]).removeprefix("torch.")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOPs as a share of the devices' peak over a step."""
        most = self.device.peak_flop_per_s(self.dtype) * self.plan.job.ranks * self.times.seconds
        return self.model.step_flops(self.plan.job) / most

    def rows(self) -> list[tuple[str, ...]]:
        """The table of memory: a row per distinct need; of many, the ends, the middle and the largest."""
        alike: dict[tuple[int, ...], list[StagePlan]] = {}
        for stage in self.plan.stages:
            alike.setdefault(tuple(stage.memory["device"].get(kind, 0) for kind in KINDS), []).append(stage)
        chosen = list(alike)
        if len(chosen) > _MOST_ROWS:
            places = {0, len(chosen) // 2, len(chosen) - 1, chosen.index(max(chosen, key=sum))}
            chosen = [chosen[place] for place in sorted(places)]
        room = shown(self.device.allocator_bytes)
        return [
            (
                runs([stage.stage for stage in alike[sizes]]),
                f"{sum(len(self.plan.job.ranks_of(stage.stage)) for stage in alike[sizes]):,}",
                *(shown(size) if size else "-" for size in sizes),
                shown(sum(sizes)),
                room,
            )
            for sizes in chosen
        ]

    def traffic_rows(self) -> list[tuple[str, ...]]:
        """The table of a rank's traffic in a step by group and operation, on the stage with the most."""
        stage = max(self.plan.stages, key=lambda stage: sum(stage.payload.values()))
        return [
            (
                group,
                operation,
                f"{calls:,}",
                shown(stage.payload[group, operation]),
                stage.reach(group, self.per_node),
            )
            for (group, operation), calls in sorted(stage.traffic.items())
            if stage.payload[group, operation] > _LEAST_SHOWN * max(stage.payload.values())
        ]

    def headline(self) -> str:
        """Describe the job in one line."""
        job = self.plan.job
        shape = PipelineShape.of(job.config)
        kind = f", {shape.kind}" if shape.stages > 1 else ""
        layout = layout_words(job.grid, shape.chunks_per_stage)
        return (
            f"{many(self.model.parameters)} parameters on {job.ranks:,} x {self.device.name}: "
            f"{layout}, ZeRO {job.config.zero.stage}{kind}; {job.micro_batches} micro-batches of "
            f"{job.config.batch.micro_batch_size * job.step.rows} x {job.step.sequence_length:,} tokens"
        )

    def verdict(self) -> str:
        """Say whether the job fits, and which stage and kinds need the most memory."""
        stage, room = self.plan.fullest, self.device.allocator_bytes
        kinds = sorted(stage.memory["device"].items(), key=lambda item: -item[1])[:3]
        most = ", ".join(f"{kind} {shown(size)}" for kind, size in kinds)
        word = "fits" if self.fits else "does not fit"
        return (
            f"{word}: {shown(stage.device_bytes)} of {shown(room)} on stage {stage.stage}, most at "
            f"{stage.peak.when}; {most}"
        )

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, figure) of the step and the training."""
        job, times = self.plan.job, self.times
        seconds, tokens = times.seconds, job.step.positions
        rate, hardware = tokens / seconds, sum(stage.flops for stage in self.plan.stages)
        exposed = max(times.exposed)
        yield "step", f"{time_text(seconds)}, of which the update {time_text(times.update.total)}"
        yield "bubble", f"{times.bubble:.1%} of the stages' time"
        yield "calls", f"{exposed / seconds:.1%} of a rank's time waits for calls of its layers"
        yield "tokens", f"{rate:,.0f} a second, {rate / job.ranks:,.1f} a device"
        a_device = many(self.model.step_flops(job) / job.ranks / seconds, "MGTP")
        done = many(hardware / len(self.plan.stages) / seconds, "MGTP")
        yield "FLOP/s", f"{a_device} a device, MFU {self.mfu:.1%}; with recomputation {done}"
        total = training_seconds(job, times)
        steps, consumed = job.training_plan.end.iteration, job.training_plan.end.tokens
        yield (
            "training",
            f"{steps:,} steps, {many(consumed)} tokens: {time_text(total)}, "
            f"{total * job.ranks / 3600:,.0f} device-hours",
        )
        if self.price is not None:
            step, tokens_cost, whole = map(money, costs(self).values())
            yield "cost", f"{whole}; {step} a step, {tokens_cost} for 1B tokens"
        size, nodes = self.model.checkpoint_bytes, -(-job.ranks // self.per_node)
        written = size / (nodes * self.device.host.nvme_write_gb_per_s * 1e9)
        disks = "a node's own disks" if nodes == 1 else f"{nodes} nodes' own disks"
        yield "checkpoint", f"{shown(size)}; {time_text(written)} at the rate of {disks}"

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each likely problem."""
        job, times, used = self.plan.job, self.times, self.plan.fullest.device_bytes
        if times.bubble > _LARGE_BUBBLE and job.grid.pp > 1:
            yield f"pipeline bubble {times.bubble:.0%}: more micro-batches, or fewer stages, shrink it"
        if self.fits and used > _TIGHT * self.device.allocator_bytes:
            yield "memory is tight: fragments of the allocator may take what is left"
        if job.grid.tp > self.per_node:
            yield f"tensor-parallel groups of {job.grid.tp} span nodes of {self.per_node}"
        busy = times.timeline.busy
        if max(busy) > _UNEVEN * min(busy):
            slowest = busy.index(max(busy))
            yield f"stage {slowest} computes {max(busy) / min(busy):.2f} times as long as the quickest"
        if job.config.offload.parameters != "none":
            yield "weights are not on the device: the time to bring them there is not counted"
        if any(experts for experts in job.config.model.experts_by_layer):
            yield "tokens are taken to be spread evenly over experts: uneven ones take longer, and more room"

    def document(self) -> dict[str, Any]:
        """The plan as JSON."""
        times, job = self.times, self.plan.job
        return {
            "device": self.device.name,
            "ranks": job.ranks,
            "parameters": self.model.parameters,
            "fits": self.fits,
            "seconds_per_step": times.seconds,
            "update_seconds": times.update.total,
            "bubble": times.bubble,
            "mfu": self.mfu,
            "tokens_per_second": job.step.positions / times.seconds,
            "training_seconds": training_seconds(job, times),
            **({} if self.price is None else {"price_per_hour": self.price, **costs(self)}),
            "checkpoint_bytes": self.model.checkpoint_bytes,
            "warnings": list(self.warnings()),
            "stages": [
                {
                    "stage": stage.stage,
                    "memory": stage.memory,
                    "peak": stage.peak.when,
                    "flops": stage.flops,
                    "exposed_seconds": times.exposed[stage.stage],
                    "traffic": [
                        {"group": g, "operation": o, "calls": n, "bytes": stage.payload[g, o]}
                        for (g, o), n in sorted(stage.traffic.items())
                    ],
                }
                for stage in self.plan.stages
            ],
        }


def report_on(config: Config, ranks: int, device: Device, per_node: int, say: Say = None) -> PlanReport:
    """Plan a job on a device; for a CPU, the kernels run here and are timed. `say` is `Plan.of`'s.

    Raises:
        ConfigError: the model cannot be built on `ranks` ranks.
    """
    apart = device.memory.apart
    job = PlannedJob(config, ranks, apart, device="meta" if apart else "cpu")
    return PlanReport(Plan.of(job, timed=not apart, say=say), device, per_node)


def costs(report: PlanReport) -> dict[str, float]:
    """The cost of a step, of 10^9 tokens in such steps, and of the training, at the report's price."""
    job, seconds = report.plan.job, report.times.seconds
    second = (report.price or 0.0) * job.ranks / 3600
    return {
        "cost_per_step": second * seconds,
        "cost_per_billion_tokens": second * 1e9 * seconds / job.step.positions,
        "cost_of_training": second * training_seconds(job, report.times),
    }


def reasons(old: PlanReport, new: PlanReport) -> list[str]:
    """Explain why the layout `new` is better than `old`: what takes less time, or fits."""
    lines = []
    if not old.fits:
        short = (old.plan.fullest.device_bytes - old.device.allocator_bytes) / 2**30
        lines.append(f"the given layout lacks {short:.1f} GiB on stage {old.plan.fullest.stage}")
    before, after = _parts(old), _parts(new)
    for name in before:
        change = after[name] - before[name]
        if abs(change) > 0.01 * old.times.seconds:
            lines.append(f"{abs(change):.2f} s a step {'more' if change > 0 else 'less'} for {name}")
    return lines


def _parts(report: PlanReport) -> dict[str, float]:
    """The seconds of a step's parts on the busiest stage."""
    times = report.times
    busy, exposed = max(times.timeline.busy), max(times.exposed)
    at_peak = max(s.flops for s in report.plan.stages) / report.device.peak_flop_per_s(report.dtype)
    return {
        "waiting in the pipeline": times.timeline.makespan - busy,
        "waiting for calls of layers": exposed,
        "FLOPs, recomputed ones included": at_peak,
        "what kernels of these sizes take beyond their FLOPs": busy - exposed - at_peak,
        "the update": times.update.total,
    }
