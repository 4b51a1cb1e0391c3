"""A training step of one rank on paper: its own code, on tensors without content, section by section.

A section is the work of one action of the pipeline's program, what comes before it included, or the update.
Micro-batches in the middle of a step do equal work, so a step of a few of them is run, and the sections of a
step of any number are these, repeated (`Trace.steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from megazero.kernels.library import Argument, LaunchWatch
from megazero.mpu.group import DONE, Group, Transfer
from megazero.mpu.group import Work as Handle
from megazero.mpu.still_group import StillGroup
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.pipeline.actions import Action, Exchange, Instruction, Op, Program
from megazero.plan.job import Job
from megazero.plan.operators import kernels_of, launched_kernel
from megazero.plan.work import Call, Kernel, Wait, Work
from megazero.train.build import build_model
from megazero.train.observe.memory import MemoryMeter, PeakOfOutputs
from megazero.train.step.engine import Engine
from megazero.train.step.timers import Timers

When = Literal["first", "middle", "last"]


@dataclass(frozen=True)
class Section:
    """A stretch of a step.

    Attributes:
        work: kernels and calls, in the order in which they start; messages between stages are left out.
        most: the most bytes, at a time, that operators' results take beyond those that were there before.
        left: bytes that they leave behind; below 0 if they free more than they make.
    """

    work: tuple[Work, ...]
    most: int
    left: int

    @property
    def flops(self) -> float:
        """FLOPs of its matrix products and attention."""
        return sum(work.flops for work in self.work if isinstance(work, Kernel))


@dataclass(frozen=True)
class Trace:
    """The step of a rank, as a function of the number of its micro-batches.

    Attributes:
        rank: the rank that was traced, which stands for all that hold the same parts of the model.
        chunks: the chunks of its stage, in model order.
        tail: the work after the last action, the update; the first action's has that before it.
        actions: by op, the chunk's place in `chunks`, and which micro-batch it is for.
        messages: bytes of a message, by its kind and the place of the chunk that sends or takes it.
        held: bytes by place and kind that the rank holds between steps, and its buffers.
        buffers: bytes of those buffers that sections count as well.
    """

    rank: int
    chunks: tuple[int, ...]
    tail: Section
    actions: Mapping[tuple[Op, int, When], Section]
    messages: Mapping[tuple[str, str, int], int]
    held: Mapping[str, Mapping[str, int]]
    buffers: int

    def key(self, action: Action, program: Program, stage: int) -> tuple[Op, int, When]:
        """The key in `actions` of an action of a stage that holds like parts."""
        place = program.schedule.chunks_of(stage).index(action.chunk)
        return action.op, place, _when(action.microbatch, program.schedule.microbatches)

    def steps(self, program: Program, stage: int) -> Iterator[tuple[Instruction | None, Section | None]]:
        """A step of any number of micro-batches on a stage: its instructions with their sections, in order.

        The update, at the end, has no instruction; exchanges have no section.
        """
        for instruction in program.stages[stage]:
            if isinstance(instruction, Exchange):
                yield instruction, None
            else:
                yield instruction, self.actions[self.key(instruction, program, stage)]
        yield None, self.tail


class Tracer(PeakOfOutputs, LaunchWatch):
    """Watches the operators, launches and calls of one thread, and cuts them into sections at marks."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[tuple[Action | None, Section]] = []
        self.messages: dict[tuple[str, int], int] = {}  # bytes by what a `Transfer` is and its tag
        self._work: list[Work] = []
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

    def called(self, call: GroupCall, group: Group) -> Handle:
        """Take note of a call between the ranks of a group; returns what its caller may wait for."""
        self._calls += 1
        nbytes = call.payload.numel() * call.payload.element_size()
        noted = Call(
            group.name, call.operation, nbytes, tuple(group.ranks), call.async_op, number=self._calls
        )
        self._work.append(noted)
        return _Waited(self, noted.number) if call.async_op else DONE

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


class _Waited(Handle):
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

    def _collective(self, call: GroupCall) -> Handle:
        with self._tracer.moving():
            call.start(self.inner)
        return self._tracer.called(call, self)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Handle]:
        for transfer in transfers:
            nbytes = transfer.tensor.numel() * transfer.tensor.element_size()
            self._tracer.messages[transfer.kind, transfer.tag] = nbytes
        return self.inner.exchange(transfers)


def trace_rank(job: Job, rank: int) -> Trace:
    """Run a step of a few micro-batches of a rank on the meta device.

    Raises:
        ConfigError: the model cannot be built on so many ranks.
    """
    tracer = Tracer()

    def maker(name: str, ranks: tuple[int, ...]) -> Group:
        return StillGroup(name, ranks.index(rank), ranks)

    context = job.context(rank, maker)
    groups = {
        name: group if group.size == 1 else _TracedGroup(group, tracer, name)
        for name, group in context.groups.items()
    }
    context = replace(context, groups=groups)
    engine = build_model(job.vocabulary, context, job.config, job.training_plan)
    batches = job.batches(context, job.traced_micro_batches)
    engine.executor.observer = tracer.mark
    with tracer:
        engine.train_step(batches, job.step.before, Timers())
        tracer.mark(None)
    return _trace_of(job, engine, tracer, rank)


def _trace_of(job: Job, engine: Engine, tracer: Tracer, rank: int) -> Trace:
    stage, count = engine.context.pp.rank, job.traced_micro_batches
    program = job.program_of(count)
    chunks = program.schedule.chunks_of(stage)
    actions: dict[tuple[Op, int, When], Section] = {}
    for action, section in tracer.sections:
        if action is not None:
            actions[action.op, chunks.index(action.chunk), _when(action.microbatch, count)] = section
    messages = {}
    for instruction in program.stages[stage]:
        if isinstance(instruction, Exchange):
            for kind, ours in (("send", instruction.sends), ("recv", instruction.receives)):
                for message in ours:
                    own = message.chunk if kind == "send" else message.receiver
                    messages[kind, message.kind, chunks.index(own)] = tracer.messages[kind, message.tag]
    tail = tracer.sections[-1][1]
    memory = MemoryMeter.of(engine)
    _, transient = engine.executor.sharding.most_buffer_bytes
    made = transient + engine.optimizer.store.sizes().get("device", {}).get("buffers", 0)
    return Trace(rank, chunks, tail, actions, messages, memory.sizes(), made)


def _when(micro_batch: int, count: int) -> When:
    return "first" if micro_batch == 0 else "last" if micro_batch == count - 1 else "middle"
