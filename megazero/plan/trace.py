"""Trace a training step of one rank: run the real code on tensors without content, and record its work.

The record is divided into sections: one per action of the pipeline's program, with the work since the action
before, and one for the update. Micro-batches in the middle of a step do equal work, so a step of a few
micro-batches is traced, and its sections stand for a step of any number (`Trace.steps`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from megazero.account.memory import MemoryMeter, PeakOfOutputs
from megazero.account.profilers.calls import CollectiveCall
from megazero.config.steps import Progress
from megazero.kernels.library import Argument, LaunchWatch
from megazero.models.batch import MicroBatch
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.still_group import StillGroup
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.pipeline.actions import Action, Exchange
from megazero.plan.job import PlannedJob
from megazero.plan.operators import kernels_of, launched_kernel
from megazero.plan.work import MessageFacts, StepSection, Task, Trace, Wait, keyed
from megazero.train.build import build_model
from megazero.train.step.engine import Engine
from megazero.train.step.timers import Timers

_TIMED_STEPS = 5


class Tracer(PeakOfOutputs, LaunchWatch):
    """Records the operators, launches and calls of one thread, and divides them into sections at marks."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[tuple[Action | None, StepSection]] = []
        self.messages: dict[tuple[str, int], int] = {}  # bytes by a transfer's kind and tag
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
        """Record a call between the ranks of a group; returns its `Work`."""
        if not self.watches:
            return DONE
        self._calls += 1
        nbytes = call.payload.numel() * call.payload.element_size()
        self._work.append(
            CollectiveCall(group.name, call.operation, nbytes, group.ranks, call.async_op, self._calls)
        )
        return _TracedWork(self, self._calls) if call.async_op else DONE

    def exchanged(self, transfers: Sequence[Transfer], group: Group) -> list[Work]:
        """Record messages that are exchanged at the same time; returns a `Work` for each.

        Messages between pipeline stages belong to the program, not to a section.
        """
        with self.moving():
            for transfer in transfers:
                if transfer.kind == "recv":
                    transfer.tensor.zero_()
        if not self.watches:
            return [DONE] * len(transfers)
        if group.name == "pp":
            for transfer in transfers:
                self._record_stage_message(transfer)
            return [DONE] * len(transfers)
        self._calls += 1
        for transfer in transfers:
            nbytes = transfer.tensor.numel() * transfer.tensor.element_size()
            ends = (group.ranks[group.rank], group.ranks[transfer.peer])
            self._work.append(
                CollectiveCall(group.name, transfer.kind, nbytes, ends, later=True, number=self._calls)
            )
        return [_TracedWork(self, self._calls) for _ in transfers]

    def _record_stage_message(self, transfer: Transfer) -> None:
        tensor, key = transfer.tensor, (transfer.kind, transfer.tag)
        self.messages[key] = tensor.numel() * tensor.element_size()
        size = self.forget(tensor.untyped_storage(), partial(self._record_free, key))
        if transfer.kind == "recv":
            return
        # The tensor was made in the previous section, because a send follows the action that makes its
        # tensor.
        action, section = self.sections[-1]
        self.sections[-1] = action, replace(section, left=section.left - size)
        self._before -= size

    def _record_free(self, key: tuple[str, int]) -> None:
        self.freed_in[key] = len(self.sections)

    def waited(self, number: int) -> None:
        """Record that the rank waits for call `number`."""
        self._work.append(Wait(number))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Within the block, ignore operators: a group fills in a result, which is not the rank's work."""
        self._moving = True
        yield
        self._moving = False

    def mark(self, action: Action | None, _: float = 0.0) -> None:
        """End the section of `action`, or of the update if it is None."""
        section = StepSection(tuple(self._work), max(0, self.most - self._before), self.alive - self._before)
        self.sections.append((action, section))
        self._work, self._before, self.most = [], self.alive, self.alive


class _TracedWork(Work):
    """A call in progress, whose first wait a tracer records."""

    def __init__(self, tracer: Tracer, number: int):
        self._tracer = tracer
        self._number = number
        self._open = True

    def wait(self) -> None:
        if self._open:
            self._tracer.waited(self._number)
        self._open = False


class _TracedGroup(WrappingGroup):
    """Passes calls to a group that moves nothing, and records them in a tracer."""

    def __init__(self, inner: Group, tracer: Tracer, name: str):
        super().__init__(inner, name)
        self._tracer = tracer

    def _collective(self, call: GroupCall) -> Work:
        with self._tracer.moving():
            call.start(self.inner)
        return self._tracer.called(call, self)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        return self._tracer.exchanged(transfers, self)


def trace_rank(job: PlannedJob, rank: int, *, timed: bool = False) -> Trace:
    """Trace a step of `job.traced_micro_batches` micro-batches on a rank.

    Args:
        job: the training.
        rank: the rank.
        timed: whether to time the sections too, in further steps, as is possible if the kernels run.

    Raises:
        ConfigError: the model cannot be built on the job's ranks.
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
    """The seconds of each section of a step without a tracer, as medians over a few steps."""
    steps: list[list[float]] = []

    def record(_: Action, seconds: float) -> None:
        steps[-1].append(seconds)

    engine.executor.observer = record
    for _ in range(_TIMED_STEPS):
        steps.append([])
        began = time.perf_counter()
        engine.train_step(batches, progress, Timers())
        steps[-1].append(time.perf_counter() - began - sum(steps[-1]))
    return [statistics.median(times) for times in zip(*steps, strict=True)]


def _trace_of(job: PlannedJob, engine: Engine, tracer: Tracer) -> Trace:
    stage, count = engine.context.pp.rank, job.traced_micro_batches
    program = job.program_of(count)
    done = (section for action, section in tracer.sections if action is not None)
    keys = (key for _, key in keyed(program, stage) if key is not None)
    actions = dict(zip(keys, done, strict=True))
    chunks = program.schedule.chunks_of(stage)
    seen: defaultdict[tuple[str, str, int], Counter[MessageFacts]] = defaultdict(Counter)
    for instruction in program.stages[stage]:
        if not isinstance(instruction, Exchange):
            continue
        for way, sent in (("send", instruction.sends), ("recv", instruction.receives)):
            for message in sent:
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
