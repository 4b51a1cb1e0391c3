"""The planned time of a step: sections by a device's prices, simulated in the pipeline's schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from megazero.account.profilers.calls import CollectiveCall
from megazero.pipeline.actions import Op, Schedule
from megazero.pipeline.simulate import Costs, Timeline, simulate
from megazero.plan.prices import Prices
from megazero.plan.stage import StagePlan
from megazero.plan.work import Kernel, StepSection, Task, Trace


@dataclass(frozen=True)
class WorkDuration:
    """The time of a rank's work, in seconds.

    Attributes:
        total: until the rank goes on to other work.
        kernels: the part of `total` in which kernels run.
        exposed: the part of `total` in which the rank waits for calls.
        beside: the time of calls that this work starts, but does not wait for.
    """

    total: float = 0.0
    kernels: float = 0.0
    exposed: float = 0.0
    beside: float = 0.0

    def __add__(self, other: WorkDuration) -> WorkDuration:
        return WorkDuration(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> WorkDuration:
        return WorkDuration(*(getattr(self, f.name) * times for f in fields(self)))


def exchanges(work: Iterable[Task]) -> Iterator[Task]:
    """Merge messages that are exchanged at the same time into one call; the two directions do not add up."""
    for number, together in groupby(
        work, key=lambda part: part.number if isinstance(part, CollectiveCall) else 0
    ):
        parts = list(together)
        calls = [part for part in parts if isinstance(part, CollectiveCall)]
        if not number or len(calls) < 2:
            yield from parts
            continue
        ways = Counter[str]()
        for call in calls:
            ways[call.operation] += call.nbytes
        yield replace(calls[0], operation="exchange", nbytes=max(ways.values()))


def duration_of(work: Iterable[Task], prices: Prices) -> WorkDuration:
    """The time of a rank's work: kernels run in sequence, and each group's calls in sequence beside them."""
    clock = kernels = exposed = 0.0
    free: dict[str, float] = {}  # by group: the end of its last call
    ends: dict[int, tuple[float, float]] = {}  # by the number of a call: its end and its seconds
    for part in exchanges(work):
        if isinstance(part, Kernel):
            seconds = prices.kernel(part)
            clock, kernels = clock + seconds, kernels + seconds
            continue
        if isinstance(part, CollectiveCall):
            seconds = prices.call(part)
            end = free[part.group] = max(clock, free.get(part.group, 0.0)) + seconds
            if part.later:
                ends[part.number] = end, seconds
                continue
        else:
            end, _ = ends.pop(part.call, (clock, 0.0))
        exposed += max(0.0, end - clock)
        clock = max(clock, end)
    return WorkDuration(clock, kernels, exposed, sum(seconds for _, seconds in ends.values()))


def section_duration(section: StepSection, prices: Prices) -> WorkDuration:
    """The time of a section.

    If its kernels were timed, on a CPU, all calls add to their time, because the same cores compute and
    communicate.
    """
    if section.seconds is None:
        return duration_of(section.work, prices)
    calls = sum(prices.call(call) for call in exchanges(section.work) if isinstance(call, CollectiveCall))
    return WorkDuration(section.seconds + calls, section.seconds, calls)


def offloaded(stage: StagePlan, prices: Prices) -> float:
    """The seconds of a stage's update of offloaded state; 0 on a CPU, whose update is timed as a whole."""
    if stage.trace.tail.seconds is not None:
        return 0.0
    return sum(
        prices.offloaded(place, kinds)
        for place, kinds in stage.memory.items()
        if place != "device" and kinds["masters"]
    )


@dataclass(frozen=True)
class StepTimes:
    """The times of a step.

    Attributes:
        timeline: the pipeline's timeline, up to the end of the last reduction.
        update: the time after the timeline, on the slowest stage.
        exposed: by stage, the seconds of a step in which a rank waits for calls of its layers.
    """

    timeline: Timeline
    update: WorkDuration
    exposed: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The time of the whole step."""
        return self.timeline.makespan + self.update.total

    @property
    def bubble(self) -> float:
        """The share of all stages' time before the update in which they wait for each other."""
        return self.timeline.bubble

    @classmethod
    def of(cls, stages: Sequence[StagePlan], prices: Prices) -> StepTimes:
        """Time a step of all stages of a pipeline, in order."""
        program = stages[0].program
        count = program.schedule.microbatches
        known = {id(stage.trace): _Durations(stage.trace, count, prices) for stage in stages}
        own = [known[id(stage.trace)] for stage in stages]
        updates = (
            durations.tail + WorkDuration(offloaded(stage, prices))
            for durations, stage in zip(own, stages, strict=True)
        )
        update = max(updates, key=lambda update: update.total)
        slowest_message = max((prices.call(call) for stage in stages for call in stage.messages), default=0.0)
        costs = _costs(program.schedule, own, slowest_message)
        exposed = tuple(durations.exposed * count for durations in own)
        return cls(simulate(program, costs), update, exposed)


class _Durations:
    """The durations of a trace's sections in a step of `micro_batches` micro-batches."""

    def __init__(self, trace: Trace, micro_batches: int, prices: Prices):
        self.trace = trace
        self.micro_batches = micro_batches
        self.prices = prices
        self._known: dict[int, WorkDuration] = {}

    def of(self, op: Op, place: int) -> WorkDuration:
        """The mean duration of an op on the stage's chunk `place` for a micro-batch."""
        last = self.micro_batches - 1
        total = sum((self.at(op, place, number) for number in {0, last}), WorkDuration())
        total += self.at(op, place, last // 2 + last % 2) * max(0, last - 1)
        return total * (1 / self.micro_batches)

    def at(self, op: Op, place: int, number: int) -> WorkDuration:
        """The duration of an op on the stage's chunk `place` for micro-batch `number`."""
        return self._of(self.trace.like((op, place, number, 0), self.micro_batches))

    @property
    def tail(self) -> WorkDuration:
        """The duration of the update."""
        return self._of(self.trace.tail)

    @property
    def exposed(self) -> float:
        """The seconds for which a rank waits for calls of its layers, per micro-batch."""
        places = range(self.trace.chunks)
        return sum(self.of(op, place).exposed for op in Op if op.computes for place in places)

    def _of(self, section: StepSection) -> WorkDuration:
        known = self._known.get(id(section))
        if known is None:
            known = self._known[id(section)] = section_duration(section, self.prices)
        return known


def _costs(schedule: Schedule, stages: Sequence[_Durations], transfer: float) -> Costs:
    """The costs of each chunk's actions; `transfer` is that of a message between stages."""
    last, split = schedule.microbatches - 1, schedule.backward_op is Op.INPUT

    def of(op: Op) -> tuple[float, ...]:
        return tuple(_at(schedule, stages, chunk).of(op, place).total for chunk, place in _places(schedule))

    gathers, reduces = [], []
    for chunk, place in _places(schedule):
        own = _at(schedule, stages, chunk)
        gather = own.of(Op.GATHER, place)
        gathers.append(gather.total + gather.beside)
        ends = own.at(Op.WEIGHT if split else Op.BACKWARD, place, last)
        after = own.at(Op.REDUCE, place, last)
        reduces.append(ends.beside + after.total + after.beside)
    return Costs(
        of(Op.FORWARD), of(Op.BACKWARD), of(Op.INPUT), of(Op.WEIGHT), transfer, tuple(gathers), tuple(reduces)
    )


def _places(schedule: Schedule) -> list[tuple[int, int]]:
    """(chunk, its place among its stage's chunks) of all chunks of the model."""
    return [(chunk, schedule.chunks_of(stage).index(chunk)) for chunk, stage in enumerate(schedule.stage_of)]


def _at(schedule: Schedule, stages: Sequence[_Durations], chunk: int) -> _Durations:
    return stages[schedule.stage_of[chunk]]
