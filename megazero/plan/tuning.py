"""The layouts that a job could have, and the best of them on paper.

Candidates come from the sizes that divide, are judged by the project's own rules, and are ordered by a bound
that takes microseconds: FLOPs at the device's rate, the bubble, and bytes at rest. The most promising are
planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from types import MappingProxyType

from megazero.config.rules.table import broken_rules
from megazero.config.tree.config import Config
from megazero.config.tree.recompute import RecomputeConfig
from megazero.plan.device import Device
from megazero.plan.job import Job
from megazero.plan.plan import Plan
from megazero.plan.report import Report
from megazero.plan.training import Model
from megazero.train.parts.chunks import DTYPES

RECOMPUTES = ("none", "selective", "full")
_STATE = 12  # bytes of a parameter's master and moments
_OVERHEAD = MappingProxyType({"none": 1.0, "selective": 1.0, "full": 4 / 3})


@dataclass(frozen=True, order=True)
class Layout:
    """A way to lay a job out.

    Attributes:
        tensor, pipeline, virtual: ranks of a layer, which share its rows too, stages, and chunks on each.
        expert: ranks that share the experts; 1 without any.
        zero: the ZeRO stage.
        recompute: ``none``, ``selective`` or ``full``.
        micro_batch: samples of a micro-batch.
    """

    tensor: int
    pipeline: int
    virtual: int
    expert: int
    zero: int
    recompute: str
    micro_batch: int

    def applied(self, config: Config) -> Config:
        """The job in this layout."""
        layers = config.model.num_layers
        chunk = layers // self.pipeline // self.virtual if self.virtual > 1 else None
        parallel = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "num_layers_per_virtual_pipeline_stage": chunk,
            "num_virtual_stages_per_pipeline_rank": None,
            "pipeline_schedule": "auto",
            "pipeline_partition": "uniform",
            "expert_model_parallel_size": self.expert,
            "sequence_parallel": self.tensor > 1,
        }
        fresh, kept = RecomputeConfig(), ("method", "num_layers", "partition_activations")
        recompute = {"granularity": self.recompute, **{name: getattr(fresh, name) for name in kept}}
        changes = {
            "parallel": parallel,
            "recompute": recompute,
            "zero": {"stage": self.zero},
            "batch": {"micro_batch_size": self.micro_batch},
        }
        sections = {name: getattr(config, name).model_copy(update=own) for name, own in changes.items()}
        return config.model_copy(update=sections)

    def __str__(self) -> str:
        parts = [f"T{self.tensor}", f"P{self.pipeline}", f"V{self.virtual}", f"E{self.expert}"]
        shown = [part for part in parts if not part.endswith("1") or len(part) > 2]
        sp = ", SP" if self.tensor > 1 else ""
        words = " x ".join(shown) or "D alone"
        return f"{words}, ZeRO {self.zero}{sp}, recompute {self.recompute}, b {self.micro_batch}"


@dataclass(frozen=True)
class Planned:
    """A layout, planned.

    Attributes:
        layout: the layout.
        device_bytes: bytes on the fullest device.
        fits: whether there is room for them.
        seconds: of a step.
        bubble, mfu: shares.
        tokens_per_second: of the whole job.
    """

    layout: Layout
    device_bytes: int
    fits: bool
    seconds: float
    bubble: float
    mfu: float
    tokens_per_second: float

    @classmethod
    def of(cls, search: Search, layout: Layout) -> Planned:
        """Plan a layout of a search.

        Raises:
            ConfigError: the model cannot be built in it.
        """
        report = search.report(layout)
        tokens = report.plan.job.step.positions / report.times.seconds
        used, times = report.plan.fullest.device_bytes, report.times
        return cls(layout, used, report.fits, times.seconds, times.bubble, report.mfu, tokens)

    def document(self) -> dict[str, object]:
        """The result as JSON; `read` is the inverse."""
        return asdict(self)

    @classmethod
    def read(cls, document: dict[str, object]) -> Planned:
        """The result that `document` wrote."""
        layout = document["layout"]
        assert isinstance(layout, dict), "a layout is an object"
        rest = {key: value for key, value in document.items() if key != "layout"}
        return cls(Layout(**layout), **rest)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Search:
    """A job whose layout is looked for.

    Attributes:
        given: its configuration, as it was given.
        ranks: its ranks.
        device, per_node: where it runs, and how many ranks share a node.
    """

    given: Config
    ranks: int
    device: Device
    per_node: int

    def config(self, layout: Layout | None) -> Config:
        """The job's configuration in a layout, or as it was given."""
        return self.given if layout is None else layout.applied(self.given)

    def refused(self, layout: Layout) -> bool:
        """Whether the rules refuse a layout."""
        return bool(broken_rules(self.config(layout), self.ranks))

    def report(self, layout: Layout | None = None) -> Report:
        """The report on a layout, or on the job as it was given."""
        job = Job(self.config(layout), self.ranks, self.device.memory.apart)
        return Report(Plan.of(job), self.device, self.per_node)

    def candidates(self) -> Iterator[Layout]:
        """Every layout whose sizes divide: slices within a node, all ranks used, whole micro-batches."""
        config = self.given
        model, batch = config.model, config.batch.final_batch_size or self.ranks
        experts = max(model.experts_by_layer, default=0) or 1
        for tensor, pipeline in product(_divisors(self.per_node), _divisors(model.num_layers)):
            shared = tensor * pipeline * config.parallel.context_parallel_size
            if self.ranks % shared or model.num_attention_heads % tensor:
                continue
            replicas = self.ranks // shared
            sizes = [size for size in (1, 2, 4, 8, 16) if batch % (replicas * size) == 0]
            chunks = [v for v in _divisors(model.num_layers // pipeline) if pipeline > 1 or v == 1]
            spread = [e for e in _divisors(experts) if replicas % e == 0]
            stages = (1,) if pipeline > 1 else (1, 2, 3)
            for rest in product(chunks, spread, stages, RECOMPUTES, sizes):
                virtual, expert, zero, recompute, size = rest
                if virtual > 1 and batch // replicas // size % pipeline:
                    continue
                yield Layout(tensor, pipeline, virtual, expert, zero, recompute, size)

    def ordered(self) -> list[tuple[float, Layout]]:
        """The candidates whose state alone has room, by a bound of a step's seconds that is too low."""
        config = self.given
        model = Model.of(Job(config, self.ranks, apart=True))
        kind = str(DTYPES[config.precision.dtype]).removeprefix("torch.")
        peak, positions = self.device.peak_flop_per_s(kind), self._batch * config.model.seq_length
        bounds = []
        for layout in self.candidates():
            replicas = self.ranks // (layout.tensor * layout.pipeline)
            if self._state(model.parameters, layout, replicas) > self.device.allocator_bytes:
                continue
            micro_batches = max(1, self._batch // replicas // layout.micro_batch)
            work = 3 * model.forward_flops * positions * _OVERHEAD[layout.recompute] / self.ranks / peak
            bubble = (layout.pipeline - 1) / (layout.virtual * micro_batches)
            bounds.append((work * (1 + bubble), layout))
        return sorted(bounds)

    @property
    def _batch(self) -> int:
        return int(self.given.batch.final_batch_size or self.ranks)

    def _state(self, parameters: int, layout: Layout, replicas: int) -> float:
        """Bytes at rest of a rank, if all stages had as much: weights, gradients, and the optimizer's."""
        held = parameters / (layout.tensor * layout.pipeline)
        width = DTYPES[self.given.precision.dtype].itemsize
        weights = width / (replicas if layout.zero == 3 else 1)
        gradients = 4 / (replicas if layout.zero >= 2 else 1)
        return held * (weights + gradients + _STATE / (replicas if layout.zero else 1))


def best(results: Iterable[Planned], count: int) -> list[Planned]:
    """The quickest that fit; if none does, those that lack least."""
    known = list(results)
    fitting = sorted((r for r in known if r.fits), key=lambda r: r.seconds)
    return fitting[:count] or sorted(known, key=lambda r: r.device_bytes)[:count]


def reasons(given: Report, chosen: Report) -> list[str]:
    """Why a plan is better than the given one: what takes less time, or has room."""
    lines = []
    if not given.fits:
        short = (given.plan.fullest.device_bytes - given.device.allocator_bytes) / 2**30
        lines.append(f"the given layout lacks {short:.1f} GiB on stage {given.plan.fullest.stage}")
    before, after = _parts(given), _parts(chosen)
    for name in before:
        change = after[name] - before[name]
        if abs(change) > 0.01 * given.times.seconds:
            lines.append(f"{abs(change):.2f} s a step {'more' if change > 0 else 'less'} for {name}")
    return lines


def _parts(report: Report) -> dict[str, float]:
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


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
