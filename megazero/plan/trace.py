"""A training step of one rank on paper: its own code, on tensors without content, section by section.

A section is the work of one action of the pipeline's program, what comes before it included, or the update.
Micro-batches in the middle of a step do equal work, so a step of a few of them is run, and the sections of a
step of any number are these, repeated (`Trace.steps`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megazero.account.memory import MemoryMeter, PeakOfOutputs
from megazero.account.profilers.calls import Call
from megazero.config.steps import Progress
from megazero.kernels.library import Argument, LaunchWatch
from megazero.models.batch import MicroBatch
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.still_group import StillGroup
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.pipeline.actions import Action, Exchange, Instruction, Message, Op, Program
from megazero.plan.job import Job
from megazero.plan.operators import kernels_of, launched_kernel
from megazero.plan.work import Kernel, Task, Wait
from megazero.train.build import build_model
from megazero.train.step.engine import Engine
from megazero.train.step.timers import Timers

Key = tuple[Op, int, int, int]


@dataclass(frozen=True)
class Section:
    """A stretch of a step.

    Attributes:
        work: kernels and calls, in the order in which they start; messages between stages are left out.
        most: the most bytes, at a time, that operators' results take beyond those that were there before.
        left: bytes that they leave behind; below 0 if they free more than they make.
        seconds: the time that its kernels took, if they ran and were timed.
    """

    work: tuple[Task, ...]
    most: int
    left: int
    seconds: float | None = None

    @property
    def flops(self) -> float:
        """FLOPs of its matrix products and attention."""
        return sum(work.flops for work in self.work if isinstance(work, Kernel))


_TIMED_STEPS = 5
NOTHING = Section((), 0, 0)


class MessageFacts(NamedTuple):
    """Facts about the messages of one kind that a chunk sends or takes.

    Attributes:
        nbytes: the bytes of one.
        until: the action of its micro-batch on this chunk at whose end it is freed; None: when a later
            exchange waits for it.
    """

    nbytes: int
    until: Op | None


@dataclass(frozen=True)
class Trace:
    """The step of a rank, as a function of the number of its micro-batches.

    Attributes:
        micro_batches: how many of them were traced.
        chunks: how many chunks of the model the rank's stage has.
        tail: the work after the last action, the update; the first action's has that before it.
        actions: by op, the chunk's place on the stage, the micro-batch, and how often the program has had
            that action before: weights are gathered for forward, and again for backward.
        messages: by ``send`` or ``recv``, the kind, and the place of the chunk that sends or takes it.
        held: bytes by place and kind that the rank holds between steps, and its buffers.
        buffers: bytes of those buffers that sections count as well.
    """

    micro_batches: int
    chunks: int
    tail: Section
    actions: Mapping[Key, Section]
    messages: Mapping[tuple[str, str, int], MessageFacts]
    held: Mapping[str, Mapping[str, int]]
    buffers: int

    @property
    def boundary(self) -> int:
        """Bytes of the largest message between stages; 0 with a single stage."""
        return max((facts.nbytes for facts in self.messages.values()), default=0)

    def steps(self, program: Program, stage: int) -> Iterator[tuple[Instruction | None, Section | None]]:
        """A step of any number of micro-batches, on a stage that holds like parts: instructions and sections.

        The update, at the end, has no instruction; exchanges have no section.
        """
        for instruction, key in keyed(program, stage):
            yield instruction, None if key is None else self.like(key, program.schedule.microbatches)
        yield None, self.tail

    def like(self, key: Key, micro_batches: int) -> Section:
        """The section that does what an action does in a step of so many micro-batches."""
        op, place, number, times = key
        last, middle = self.micro_batches - 1, self.micro_batches // 2
        if micro_batches != self.micro_batches:
            number = 0 if number == 0 else last if number == micro_batches - 1 else middle
        likest = ((op, place, n, t) for t in (times, 0) for n in (number, middle, last, 0))
        return next((self.actions[k] for k in likest if k in self.actions), NOTHING)


def keyed(program: Program, stage: int) -> Iterator[tuple[Instruction, Key | None]]:
    """The instructions of a stage with the keys of their sections; exchanges have none."""
    before: Counter[Action] = Counter()
    chunks = program.schedule.chunks_of(stage)
    for instruction in program.stages[stage]:
        if isinstance(instruction, Exchange):
            yield instruction, None
            continue
        place = chunks.index(instruction.chunk)
        yield instruction, (instruction.op, place, instruction.microbatch, before[instruction])
        before[instruction] += 1


class Tracer(PeakOfOutputs, LaunchWatch):
    """Watches the operators, launches and calls of one thread, and cuts them into sections at marks."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[tuple[Action | None, Section]] = []
        self.messages: dict[tuple[str, int], int] = {}  # bytes by what a `Transfer` is and its tag
        self.freed_in: dict[
            tuple[str, int], int
        ] = {}  # the section in which a message that came in was freed
        self.watches = True
        self._work: list[Task] = []
        self._calls = self._before = 0
        self._moving = False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self._moving:
            self._work += kernels_of(func, (args, kwargs), out)
        return out

    def launched(self, name: str, arguments: Sequence[Argument]) -> None:
        self._work.append(launched_kernel(name, arguments))

    def called(self, call: GroupCall, group: Group) -> Work:
        """Take note of a call between the ranks of a group; returns what its caller may wait for."""
        if not self.watches:
            return DONE
        self._calls += 1
        nbytes = call.payload.numel() * call.payload.element_size()
        noted = Call(group.name, call.operation, nbytes, group.ranks, call.async_op, number=self._calls)
        self._work.append(noted)
        return _Waited(self, noted.number) if call.async_op else DONE

    def exchanged(self, transfers: Sequence[Transfer], group: Group) -> list[Work]:
        """Take note of messages under way at once; returns what their caller may wait for.

        Those between stages belong to the program, not to a section.
        """
        with self.moving():
            for transfer in transfers:
                if transfer.kind == "recv":
                    transfer.tensor.zero_()
        if not self.watches:
            return [DONE] * len(transfers)
        if group.name == "pp":
            for transfer in transfers:
                self._passed(transfer)
            return [DONE] * len(transfers)
        self._calls += 1
        for transfer in transfers:
            nbytes = transfer.tensor.numel() * transfer.tensor.element_size()
            ends = (group.ranks[group.rank], group.ranks[transfer.peer])
            self._work.append(Call(group.name, transfer.kind, nbytes, ends, later=True, number=self._calls))
        return [_Waited(self, self._calls) for _ in transfers]

    def _passed(self, transfer: Transfer) -> None:
        """Take note of a message between stages."""
        tensor, key = transfer.tensor, (transfer.kind, transfer.tag)
        self.messages[key] = tensor.numel() * tensor.element_size()
        given = self.forget(tensor.untyped_storage(), partial(self._freed, key))
        if transfer.kind == "recv":
            return
        # It was made in the section before, as an exchange with a send follows the action that made it.
        action, section = self.sections[-1]
        self.sections[-1] = action, replace(section, left=section.left - given)
        self._before -= given

    def _freed(self, key: tuple[str, int]) -> None:
        self.freed_in[key] = len(self.sections)

    def waited(self, number: int) -> None:
        """Take note that the rank waits here for a call."""
        self._work.append(Wait(number))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Within the block a group fills in a result, which is no work of the rank's."""
        self._moving = True
        yield
        self._moving = False

    def mark(self, action: Action | None, _: float = 0.0) -> None:
        """End a section, which is that of `action`."""
        section = Section(tuple(self._work), max(0, self.most - self._before), self.alive - self._before)
        self.sections.append((action, section))
        self._work, self._before, self.most = [], self.alive, self.alive


class _Waited(Work):
    """A call in progress, whose first wait a tracer sees."""

    def __init__(self, tracer: Tracer, number: int):
        self._tracer = tracer
        self._number = number
        self._open = True

    def wait(self) -> None:
        if self._open:
            self._tracer.waited(self._number)
        self._open = False


class _TracedGroup(WrappingGroup):
    """Passes calls to a group that moves nothing, and tells the tracer."""

    def __init__(self, inner: Group, tracer: Tracer, name: str):
        super().__init__(inner, name)
        self._tracer = tracer

    def _collective(self, call: GroupCall) -> Work:
        with self._tracer.moving():
            call.start(self.inner)
        return self._tracer.called(call, self)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        return self._tracer.exchanged(transfers, self)


def trace_rank(job: Job, rank: int, *, timed: bool = False) -> Trace:
    """Run a step of a few micro-batches of a rank.

    Args:
        job: the training.
        rank: the rank.
        timed: whether to time its sections too, in further steps; for a job whose kernels run.

    Raises:
        ConfigError: the model cannot be built on so many ranks.
    """
    tracer = Tracer()

    def maker(name: str, ranks: Sequence[int]) -> Group:
        return StillGroup(name, ranks.index(rank), ranks)

    context = job.context(rank, maker)
    groups = {
        name: group if group.size == 1 else _TracedGroup(group, tracer, name)
        for name, group in context.groups.items()
    }
    context = replace(context, groups=groups)
    engine = build_model(job.vocabulary, context, job.config, job.training_plan)
    few = job.batches(context, job.traced_micro_batches)
    engine.executor.observer = tracer.mark
    with tracer:
        engine.train_step(few, job.step.before, Timers())
        tracer.mark(None)
    if timed:
        tracer.watches = False
        seconds = _seconds(engine, few, job.step.before)
        tracer.sections = [
            (action, replace(section, seconds=own))
            for (action, section), own in zip(tracer.sections, seconds, strict=True)
        ]
    return _trace_of(job, engine, tracer)


def _seconds(engine: Engine, batches: Sequence[MicroBatch], progress: Progress) -> list[float]:
    """The time of each section of a step that nobody watches, the median of a few steps."""
    steps: list[list[float]] = []

    def note(_: Action, seconds: float) -> None:
        steps[-1].append(seconds)

    engine.executor.observer = note
    for _ in range(_TIMED_STEPS):
        steps.append([])
        began = time.perf_counter()
        engine.train_step(batches, progress, Timers())
        steps[-1].append(time.perf_counter() - began - sum(steps[-1]))
    return [statistics.median(times) for times in zip(*steps, strict=True)]


def _ways(instruction: Instruction) -> tuple[tuple[str, Sequence[Message]], ...]:
    """The messages of an exchange, by ``send`` and ``recv``."""
    if not isinstance(instruction, Exchange):
        return ()
    return (("send", instruction.sends), ("recv", instruction.receives))


def _trace_of(job: Job, engine: Engine, tracer: Tracer) -> Trace:
    stage, count = engine.context.pp.rank, job.traced_micro_batches
    program = job.program_of(count)
    done = (section for action, section in tracer.sections if action is not None)
    keys = (key for _, key in keyed(program, stage) if key is not None)
    actions = dict(zip(keys, done, strict=True))
    chunks = program.schedule.chunks_of(stage)
    seen: defaultdict[tuple[str, str, int], Counter[MessageFacts]] = defaultdict(Counter)
    for instruction in program.stages[stage]:
        for way, own in _ways(instruction):
            for message in own:
                chunk, key = message.chunk if way == "send" else message.receiver, (way, message.tag)
                freed_by = tracer.sections[tracer.freed_in[key]][0]
                ends_it = freed_by is not None and freed_by.microbatch == message.microbatch
                until = freed_by.op if freed_by is not None and ends_it and freed_by.chunk == chunk else None
                kind = way, message.kind, chunks.index(chunk)
                seen[kind][MessageFacts(tracer.messages[key], until)] += 1
    messages = {kind: facts.most_common(1)[0][0] for kind, facts in seen.items()}
    tail = tracer.sections[-1][1]
    memory = MemoryMeter.of(engine.optimizer.store, engine.executor)
    _, transient = engine.executor.sharding.most_buffer_bytes
    made = transient + engine.optimizer.store.sizes().get("device", {}).get("buffers", 0)
    return Trace(count, len(chunks), tail, actions, messages, memory.sizes(), made)
