"""Search the layouts of a job for the best, by planning.

Candidates are all layouts whose sizes divide and that the rules accept. They are ordered by a lower bound of
a step's time that takes microseconds: FLOPs at the device's peak, and the bubble. Then layouts near the best
so far are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from types import MappingProxyType
from typing import Any

from megazero.config.rules.table import broken_rules
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.plan.device import Device
from megazero.plan.job import PlannedJob
from megazero.plan.layout import RECOMPUTES, LayerSharding, Layout, PipelineSplit, Savings
from megazero.plan.report import PlanReport, report_on
from megazero.plan.training import Model
from megazero.train.parts.chunks import DTYPES

SIZES = (1, 2, 4, 8, 16)
"""Samples of a micro-batch."""
_STATE = 12  # bytes of a parameter's master and moments
_OVERHEAD = MappingProxyType({"none": 1.0, "selective": 1.0, "full": 4 / 3})
_ROWS = 4096  # tokens per context-parallel rank; with fewer, ranks would wait for each other
_LIKE = 12  # planned layouts that are like a given one


@dataclass(frozen=True)
class Planned:
    """A planned layout.

    Attributes:
        layout: the layout.
        device_bytes: bytes on the fullest device.
        fits: whether the device has that many.
        seconds: the time of a step.
        bubble, mfu: the pipeline's bubble and the model FLOPs utilization, as shares.
        tokens_per_second: the rate of the whole job.
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
            ConfigError: the model cannot be built in this layout.
        """
        report = search.report(layout)
        tokens = report.plan.job.step.positions / report.times.seconds
        used, times = report.plan.fullest.device_bytes, report.times
        return cls(layout, used, report.fits, times.seconds, times.bubble, report.mfu, tokens)

    def document(self) -> dict[str, object]:
        """The result as JSON; `read` is the inverse."""
        return {**vars(self), "layout": self.layout.document()}

    @classmethod
    def read(cls, document: dict[str, Any]) -> Planned:
        """Parse the JSON that `document` returned."""
        return cls(**{**document, "layout": Layout.read(document["layout"])})


@dataclass(frozen=True)
class Space:
    """The bounds of a search.

    Attributes:
        micro_batches: the sizes of a micro-batch to try, in samples.
        recomputes: the granularities of recomputation to try.
        tensor: the only tensor-parallel size to try; None tries all.
        offload: whether masters and moments are in the host's memory.
    """

    micro_batches: tuple[int, ...] = SIZES
    recomputes: tuple[str, ...] = RECOMPUTES
    tensor: int | None = None
    offload: bool = False


@dataclass(frozen=True, eq=False)
class Search:
    """A search for the layout of a job.

    Attributes:
        base: the configuration with the user's layout.
        ranks: the number of ranks.
        device: the device of each rank.
        per_node: the number of ranks on a node.
        space: the bounds of the search.
        price: what an hour of a device costs, if known.
    """

    base: Config
    ranks: int
    device: Device
    per_node: int
    space: Space = field(default_factory=Space)
    price: float | None = None

    def config(self, layout: Layout | None) -> Config:
        """The configuration with a layout; None is the user's."""
        return self.base if layout is None else layout.applied(self.base)

    def refused(self, layout: Layout) -> bool:
        """Whether the rules refuse a layout."""
        return bool(broken_rules(self.config(layout), self.ranks))

    def report(self, layout: Layout | None = None) -> PlanReport:
        """Plan a layout, or the user's, and return the report."""
        report = report_on(self.config(layout), self.ranks, self.device, self.per_node)
        return replace(report, price=self.price)

    def candidates(self) -> Iterator[Layout]:
        """Yield every layout whose sizes divide, that uses all ranks, with tensor ranks inside a node."""
        config = self.base
        model, batch = config.model, self._batch
        experts = max(model.experts_by_layer, default=0) or 1
        tensors = _divisors(self.per_node) if self.space.tensor is None else [self.space.tensor]
        for tensor, context, pipeline in product(tensors, self._contexts(), _divisors(model.num_layers)):
            replica = tensor * context * pipeline  # ranks
            if self.ranks % replica or model.num_attention_heads % tensor:
                continue
            replicas = self.ranks // replica
            sizes = [size for size in self.space.micro_batches if batch % (replicas * size) == 0]
            expert_sizes = [e for e in _divisors(experts) if replicas % e == 0]
            splits = list(self._splits(pipeline))
            savings = self._savings(pipeline, replicas * context)
            choices = product(self._sequence(tensor), expert_sizes, splits, savings, sizes)
            for sequence, expert, split, saved, size in choices:
                if split.virtual > 1 and split.schedule == "auto" and batch // replicas // size % pipeline:
                    continue
                yield Layout(LayerSharding(tensor, sequence, expert, context), split, saved, size)

    def _contexts(self) -> list[int]:
        """Context-parallel sizes to try: the user's, and powers of two that leave each rank enough tokens."""
        length = self.base.model.seq_length
        powers = [2**i for i in range(self.ranks.bit_length()) if 2**i * _ROWS <= length]
        return sorted({1, self.base.parallel.context_parallel_size, *powers})

    def _sequence(self, tensor: int) -> tuple[bool, ...]:
        """Whether to try sequence parallelism with this layout: on a GPU it is free and saves memory."""
        if tensor == 1:
            return (False,)
        return (True,) if self.device.memory.apart else (False, True)

    def _splits(self, pipeline: int) -> Iterator[PipelineSplit]:
        if pipeline == 1:
            yield PipelineSplit()
            return
        for chunks in _divisors(self.base.model.num_layers // pipeline):
            yield PipelineSplit(pipeline, chunks)
        yield PipelineSplit(pipeline, 1, "zb-h1")
        if self.base.model.num_layers // pipeline % 2 == 0:
            yield PipelineSplit(pipeline, 2, "zb-v")

    def _savings(self, pipeline: int, replicas: int) -> Iterator[Savings]:
        """ZeRO stages and recomputations to try.

        A pipeline keeps weights and gradients whole, because every micro-batch would move them otherwise.
        """
        stages = (0,) if replicas == 1 else (1,) if pipeline > 1 else (1, 2, 3)
        if not self.device.memory.apart and replicas > 1:
            stages = (0, *stages)
        for zero, recompute in product(stages, self.space.recomputes):
            yield Savings(zero, recompute, self.space.offload)

    def ordered(self) -> list[tuple[float, Layout]]:
        """List (lower bound of a step's seconds, layout) of candidates whose state fits, ascending."""
        sound = next((layout for layout in self.candidates() if not self.refused(layout)), None)
        if sound is None:
            return []
        config = self.config(sound)
        model = Model.of(PlannedJob(config, self.ranks, apart=True))
        kind = str(DTYPES[config.precision.dtype]).removeprefix("torch.")
        peak, positions = self.device.peak_flop_per_s(kind), self._batch * config.model.seq_length
        bounds = []
        for layout in self.candidates():
            stages, savings = layout.stages, layout.savings
            copies = self.ranks // (layout.slices.tensor * stages.count)  # which ZeRO shards over
            if self._state(model.parameters, layout, copies) > self.device.allocator_bytes:
                continue
            micro_batches = max(1, self._batch * layout.slices.context // copies // layout.micro_batch)
            work = 3 * model.forward_flops * positions * _OVERHEAD[savings.recompute] / self.ranks / peak
            waiting = 1 / 3 if stages.schedule == "zb-h1" else 0 if stages.schedule == "zb-v" else 1
            bubble = (stages.count - 1) * waiting / (stages.virtual * micro_batches)
            bounds.append((work * (1 + bubble), layout))
        return sorted(bounds)

    def like(self, layout: Layout) -> Iterator[Planned]:
        """Yield planned layouts that fit, by the number of settings in which they differ from `layout`."""
        offloaded = replace(self, space=replace(self.space, offload=True))
        bounds = [*self.ordered(), *offloaded.ordered()]
        bounds.sort(key=lambda bound: (bound[1].distance(layout), bound))
        too_large: list[Layout] = []
        allowed = (
            other
            for _, other in bounds
            if other != layout
            and not any(other.holds_more_than(large) for large in too_large)
            and not self.refused(other)
        )
        for other in islice(allowed, _LIKE):
            try:
                planned = Planned.of(self, other)
            except ConfigError:  # such as a stage without a part of the model, for which there is no rule
                continue
            if planned.fits:
                yield planned
            else:
                too_large.append(other)

    @property
    def _batch(self) -> int:
        return int(self.base.batch.final_batch_size or self.ranks)

    def _state(self, parameters: int, layout: Layout, copies: int) -> float:
        """A mean stage's bytes per rank between steps: weights, gradients, and the optimizer's state.

        With the optimizer on the host, sharded gradients are there too, but whole ones stay on the device.
        """
        zero, offload = layout.savings.zero, layout.savings.offload
        local = parameters / (layout.slices.tensor * layout.stages.count)
        width = DTYPES[self.base.precision.dtype].itemsize
        weights = width / (copies if zero == 3 else 1)
        gradients = 4 / (copies if zero >= 2 else 1)
        state = 0 if offload else _STATE / (copies if zero else 1)
        return local * (weights + (0 if offload and zero >= 2 else gradients) + state)


def explore(
    search: Search, plan: Callable[[Sequence[Layout]], Iterable[Planned]], most: int
) -> Iterator[Planned]:
    """Yield planned layouts, at most `most`.

    First, the layout with the lowest bound is planned of each combination of tensor-parallel,
    context-parallel and pipeline size. Then, from the best result on, layouts are planned that differ from a
    result in one setting, and whose bound is below the best time.

    Args:
        search: the search.
        plan: plans a batch of layouts, and leaves out those that cannot be built.
        most: the most layouts to plan.
    """
    bounds = {layout: bound for bound, layout in search.ordered() if not search.refused(layout)}
    firsts: dict[tuple[int, int, int], Layout] = {}
    for layout in bounds:
        firsts.setdefault((layout.slices.tensor, layout.slices.context, layout.stages.count), layout)
    batch, tried, results = list(firsts.values()), set[Layout](), list[Planned]()
    expanded: set[Layout] = set()

    def neighbours(middle: Layout, quickest: Planned) -> list[Layout]:
        """New layouts that differ from `middle` in one setting, and may be quicker than the quickest."""
        expanded.add(middle)
        near = [layout for layout in bounds if layout not in tried and layout.distance(middle) == 1]
        return [layout for layout in near if bounds[layout] < quickest.seconds or not quickest.fits]

    while batch and len(tried) < most:
        batch = batch[: most - len(tried)]
        tried.update(batch)
        for result in plan(batch):
            results.append(result)
            yield result
        ranked = best(results, len(results))
        middles = (result.layout for result in ranked if result.layout not in expanded)
        batch = next(filter(None, (neighbours(middle, ranked[0]) for middle in middles)), [])


def best(results: Iterable[Planned], count: int) -> list[Planned]:
    """The `count` quickest results that fit; if none fits, those that need the least memory."""
    known = list(results)
    fitting = sorted((r for r in known if r.fits), key=lambda r: r.seconds)
    return fitting[:count] or sorted(known, key=lambda r: r.device_bytes)[:count]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
