"""Simulates a schedule: how long it takes, and how many activations it keeps.

In a bare `Schedule` an output is sent as soon as it exists; in a lowered `Program`, once both ends have
started its `Exchange`. Communication is asynchronous: only the action that needs a message, or a gathered
chunk, waits for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megazero.errors import ConfigError
from megazero.pipeline.actions import (
    Action,
    Exchange,
    Instruction,
    Op,
    Program,
    Schedule,
    ScheduleError,
)

PerChunk = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit. The defaults are those of schedule diagrams.

    A compute cost is the cost of a whole stage, divided evenly among its chunks, or a tuple with the cost of
    each chunk of the model. A cost of gathers or reductions is the cost of any one chunk, or such a tuple.

    Attributes:
        forward, backward, input, weight: time for one micro-batch.
        transfer: time for a message between two stages.
        gather, reduce: time for one chunk's parameters or gradients; a stage does one at a time. A reduction
            that precedes its backward in the program starts with that backward and does not end before it.
    """

    forward: PerChunk = 1
    backward: PerChunk = 2
    input: PerChunk = 1
    weight: PerChunk = 1
    transfer: float = 0
    gather: PerChunk = 0
    reduce: PerChunk = 0

    def of(self, action: Action, schedule: Schedule) -> float:
        """The duration of `action`.

        Raises:
            ConfigError: the length of a tuple is not the number of chunks.
        """
        cost: PerChunk = 0 if action.op is Op.RELEASE else getattr(self, action.op.name.lower())
        if not isinstance(cost, tuple):
            return cost / schedule.chunks_per_stage if action.op.computes else cost
        if len(cost) != schedule.chunks:
            raise ConfigError(
                f"Costs by chunk must be one number for each of the {schedule.chunks} chunks, but are "
                f"{len(cost)} numbers; give one for each chunk, or one number for all"
            )
        return cost[action.chunk]


class Span(NamedTuple):
    """An action, its start time and its end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times at which the actions of a schedule run.

    Attributes:
        schedule: what was simulated.
        spans: per stage, its computing actions in order.
        collectives: per stage, its gathers and reductions in order.
        makespan: the end of the last action; the first one starts at 0.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    collectives: tuple[tuple[Span, ...], ...]
    makespan: float

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per stage, its time spent computing."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The idle fraction of all stages' time, from 0 to 1."""
        return 1 - sum(self.busy) / (self.schedule.stages * self.makespan) if self.makespan else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per stage, the most (micro-batch, chunk) activations alive at once.

        An activation lives from the start of its forward to the end of its backward (of its weight gradient,
        if split), or of its forward if the schedule has no backward.
        """
        return tuple(_peak(spans, self.schedule.training) for spans in self.spans)


def simulate(what: Schedule | Program, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule or program, with `Costs()` unless others are given.

    Raises:
        ScheduleError: stages wait for each other forever; the message says which stage waits for what.
        ConfigError: a tuple of costs does not have one number per chunk.
    """
    return _Simulation(what, costs or Costs()).run()


class _Stage:
    """The progress of one stage: its current instruction, its clocks, and the actions that it has run."""

    def __init__(self, instructions: Sequence[Instruction]):
        self.instructions = instructions
        self.position = 0
        self.clock: float = 0  # when its compute stream is free
        self.comm_clock: float = 0  # when its communication stream is free
        self.gathered: dict[int, float] = {}  # chunk -> when its gather ends
        self.announced: dict[tuple[int, int], Action] = {}  # reductions that wait for their backward
        self.spans: list[Span] = []
        self.collectives: list[Span] = []

    @property
    def current(self) -> Instruction | None:
        return self.instructions[self.position] if self.position < len(self.instructions) else None


class _Simulation:
    """One simulation: stages take turns, and each runs until it must wait for another."""

    def __init__(self, what: Schedule | Program, costs: Costs):
        self.lowered = isinstance(what, Program)
        self.schedule = what.schedule if isinstance(what, Program) else what
        self.costs = costs
        self.stages = [
            _Stage(list_) for list_ in (what.stages if isinstance(what, Program) else what.actions)
        ]
        self.ends: dict[Action, float] = {}
        # The action whose result a message carries -> when its sender, and its receiver, reach the exchange.
        self.sent: dict[Action, float] = {}
        self.posted: dict[Action, float] = {}
        self.waiting: defaultdict[Action, set[int]] = defaultdict(set)
        self.runnable = deque(range(len(self.stages)))

    def run(self) -> Timeline:
        """Run all stages to the end of their instructions."""
        while self.runnable:
            number = self.runnable.popleft()
            while self._step(number, self.stages[number]):
                pass
        if self.waiting:
            raise ScheduleError(f"The schedule cannot finish: {'; '.join(self._reasons())}")
        return Timeline(
            self.schedule,
            tuple(tuple(stage.spans) for stage in self.stages),
            tuple(tuple(stage.collectives) for stage in self.stages),
            max(max(stage.clock, stage.comm_clock) for stage in self.stages),
        )

    def _step(self, number: int, stage: _Stage) -> bool:
        """Execute a stage's current instruction; return False if there is none or it must wait."""
        match stage.current:
            case None:
                return False
            case Exchange() as exchange:
                self._exchange(stage, exchange)
            case Action(op=Op.RELEASE, chunk=chunk):
                stage.gathered.pop(chunk, None)
            case Action(op=op) as action if not op.computes:
                self._collective(stage, action)
            case Action() as action:
                missing = self._missing(number, action)
                if missing is not None:
                    self.waiting[missing].add(number)
                    return False
                self._compute(number, stage, action)
        stage.position += 1
        return True

    def _exchange(self, stage: _Stage, exchange: Exchange) -> None:
        for message in exchange.receives:
            self.posted[self.schedule.producer_of(message)] = stage.clock
        for message in exchange.sends:
            producer = self.schedule.producer_of(message)
            self.sent[producer] = stage.clock
            self._wake(producer)

    def _collective(self, stage: _Stage, action: Action) -> None:
        ends = (Action(op, action.chunk, action.microbatch) for op in Op if op.ends_backward)
        if action.op is Op.REDUCE and not any(end in self.ends for end in ends):
            stage.announced[action.chunk, action.microbatch] = action
            return
        self._communicate(stage, action, stage.clock, stage.clock)
        if action.op is Op.GATHER:
            stage.gathered[action.chunk] = stage.comm_clock

    def _communicate(self, stage: _Stage, action: Action, earliest: float, until: float) -> None:
        """Run a collective from `earliest`, or when the previous one ends, until `until` or later."""
        start = max(earliest, stage.comm_clock)
        stage.comm_clock = max(start + self.costs.of(action, self.schedule), until)
        stage.collectives.append(Span(action, start, stage.comm_clock))

    def _compute(self, number: int, stage: _Stage, action: Action) -> None:
        ready = [self._arrival(number, need) for need in self.schedule.needs(action)]
        if action.op.uses_weights:
            ready.append(stage.gathered.get(action.chunk, 0))
        start = max([stage.clock, *ready])
        stage.clock = self.ends[action] = start + self.costs.of(action, self.schedule)
        stage.spans.append(Span(action, start, stage.clock))
        if action.op.ends_backward:
            reduction = stage.announced.pop((action.chunk, action.microbatch), None)
            if reduction is not None:
                self._communicate(stage, reduction, start, stage.clock)
        if not self.lowered:  # in a program, the exchange wakes the stage that waits
            self._wake(action)

    def _remote(self, number: int, need: Action) -> bool:
        return self.schedule.stage_of[need.chunk] != number

    def _missing(self, number: int, action: Action) -> Action | None:
        """A prerequisite of `action` that has not ended or not sent its result to this stage; or None."""
        for need in self.schedule.needs(action):
            if not (self.lowered and self._remote(number, need)):
                if need not in self.ends:
                    return need
            elif need not in self.posted:
                raise ScheduleError(f"Stage {number} must receive the result of {need} before {action}")
            elif need not in self.sent:
                return need
        return None

    def _arrival(self, number: int, need: Action) -> float:
        """The time at which the result of `need` reaches stage `number`."""
        if not self._remote(number, need):
            return self.ends[need]
        start = max(self.sent[need], self.posted[need]) if self.lowered else self.ends[need]
        return start + self.costs.transfer

    def _wake(self, event: Action) -> None:
        self.runnable.extend(sorted(self.waiting.pop(event, ())))

    def _reasons(self) -> list[str]:
        return [
            f"stage {number} waits at {self.stages[number].current} for {missing} of stage "
            f"{self.schedule.stage_of[missing.chunk]}"
            for missing, numbers in self.waiting.items()
            for number in sorted(numbers)
        ]


def _peak(spans: tuple[Span, ...], training: bool) -> int:
    live = peak = 0
    for span in spans:
        live += span.action.op is Op.FORWARD
        peak = max(peak, live)
        live -= span.action.op.ends_backward or not training
    return peak
