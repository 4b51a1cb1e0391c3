"""How long a step takes on paper: its sections at a device's prices, and the schedule over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from megazero.account.profilers.calls import Call
from megazero.pipeline.actions import Op, Schedule
from megazero.pipeline.simulate import Costs, Timeline, simulate
from megazero.plan.prices import Prices
from megazero.plan.stage import StagePlan
from megazero.plan.trace import Section, Trace
from megazero.plan.work import Kernel, Task


@dataclass(frozen=True)
class Duration:
    """The time that a stretch of work takes, in seconds.

    Attributes:
        total: until the rank goes on to what comes next.
        kernels: the part of it in which kernels run.
        exposed: the part of it in which the rank waits for calls.
        beside: the time of calls that nothing here waits for.
    """

    total: float = 0.0
    kernels: float = 0.0
    exposed: float = 0.0
    beside: float = 0.0

    def __add__(self, other: Duration) -> Duration:
        return Duration(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Duration:
        return Duration(*(getattr(self, f.name) * times for f in fields(self)))


def exchanges(work: Iterable[Task]) -> Iterator[Task]:
    """The work, with messages that are under way at once as one call: the ways there and back are two."""
    for number, together in groupby(work, key=lambda part: part.number if isinstance(part, Call) else 0):
        parts = list(together)
        calls = [part for part in parts if isinstance(part, Call)]
        if not number or len(calls) < 2:
            yield from parts
            continue
        ways = Counter[str]()
        for call in calls:
            ways[call.operation] += call.nbytes
        yield replace(calls[0], operation="exchange", nbytes=max(ways.values()))


def duration_of(work: Iterable[Task], prices: Prices) -> Duration:
    """The time of a rank's work: kernels one after the other, and so the calls of each group beside them."""
    clock = kernels = exposed = 0.0
    free: dict[str, float] = {}  # by group: when its last call ends
    ends: dict[int, tuple[float, float]] = {}  # by call: when it ends, and its time
    for part in exchanges(work):
        if isinstance(part, Kernel):
            seconds = prices.kernel(part)
            clock, kernels = clock + seconds, kernels + seconds
            continue
        if isinstance(part, Call):
            seconds = prices.call(part)
            end = free[part.group] = max(clock, free.get(part.group, 0.0)) + seconds
            if part.later:
                ends[part.number] = end, seconds
                continue
        else:
            end, _ = ends.pop(part.call, (clock, 0.0))
        exposed += max(0.0, end - clock)
        clock = max(clock, end)
    return Duration(clock, kernels, exposed, sum(seconds for _, seconds in ends.values()))


def section_duration(section: Section, prices: Prices) -> Duration:
    """The time of a section.

    Where its kernels ran and were timed, on a CPU, calls add to it, those that are waited for later as well:
    the cores that would make them meanwhile are those that compute.
    """
    if section.seconds is None:
        return duration_of(section.work, prices)
    calls = sum(prices.call(call) for call in exchanges(section.work) if isinstance(call, Call))
    return Duration(section.seconds + calls, section.seconds, calls)


def offloaded(stage: StagePlan, prices: Prices) -> float:
    """The time of a stage's update of state that is not on the device; on a CPU it is timed with the rest."""
    if stage.trace.tail.seconds is not None:
        return 0.0
    held = stage.memory.items()
    return sum(
        prices.offloaded(place, kinds) for place, kinds in held if place != "device" and kinds["masters"]
    )


@dataclass(frozen=True)
class StepTimes:
    """The times of a step.

    Attributes:
        timeline: the pipeline's, up to the end of the last reduction.
        update: the time of what follows it, on the slowest stage.
        exposed: by stage, the time of a step in which a rank waits for calls of its layers.
    """

    timeline: Timeline
    update: Duration
    exposed: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The time of the whole step."""
        return self.timeline.makespan + self.update.total

    @property
    def bubble(self) -> float:
        """The share of all stages' time, up to the update, in which they wait for each other."""
        return self.timeline.bubble

    @classmethod
    def of(cls, stages: Sequence[StagePlan], prices: Prices) -> StepTimes:
        """The times of a step of these stages, which are all of a pipeline, in order."""
        program = stages[0].program
        count = program.schedule.microbatches
        known = {id(stage.trace): _Durations(stage.trace, count, prices) for stage in stages}
        own = [known[id(stage.trace)] for stage in stages]
        updates = (
            durations.tail + Duration(offloaded(stage, prices))
            for durations, stage in zip(own, stages, strict=True)
        )
        update = max(updates, key=lambda update: update.total)
        costs = _costs(program.schedule, own, _transfer(stages, prices))
        exposed = tuple(durations.exposed * count for durations in own)
        return cls(simulate(program, costs), update, exposed)


class _Durations:
    """The durations of the sections of a trace in a step of so many micro-batches."""

    def __init__(self, trace: Trace, micro_batches: int, prices: Prices):
        self.trace = trace
        self.micro_batches = micro_batches
        self.prices = prices
        self._known: dict[int, Duration] = {}

    def of(self, op: Op, place: int) -> Duration:
        """The duration of an op on a chunk for a micro-batch, the mean over the step."""
        last = self.micro_batches - 1
        total = sum((self.at(op, place, number) for number in {0, last}), Duration())
        total += self.at(op, place, last // 2 + last % 2) * max(0, last - 1)
        return total * (1 / self.micro_batches)

    def at(self, op: Op, place: int, number: int) -> Duration:
        """The duration of an op on a chunk for one micro-batch."""
        return self._of(self.trace.like((op, place, number, 0), self.micro_batches))

    @property
    def tail(self) -> Duration:
        """The duration of the update."""
        return self._of(self.trace.tail)

    @property
    def exposed(self) -> float:
        """The time in which a rank waits for the calls of its layers, for a micro-batch."""
        places = range(self.trace.chunks)
        return sum(self.of(op, place).exposed for op in Op if op.computes for place in places)

    def _of(self, section: Section) -> Duration:
        known = self._known.get(id(section))
        if known is None:
            known = self._known[id(section)] = section_duration(section, self.prices)
        return known


def _costs(schedule: Schedule, stages: Sequence[_Durations], transfer: float) -> Costs:
    """The costs of the actions of each chunk."""
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
    """The chunks of the model, each with its place among those of its stage."""
    return [(chunk, schedule.chunks_of(stage).index(chunk)) for chunk, stage in enumerate(schedule.stage_of)]


def _at(schedule: Schedule, stages: Sequence[_Durations], chunk: int) -> _Durations:
    return stages[schedule.stage_of[chunk]]


def _transfer(stages: Sequence[StagePlan], prices: Prices) -> float:
    """The time of the slowest message from a stage to the next."""
    calls = (call for stage in stages for call in stage.messages)
    return max((prices.call(call) for call in calls), default=0.0)
