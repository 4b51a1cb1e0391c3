"""The work of pipeline stages as values: actions, the schedule that orders them, the program with messages.

The model is cut into chunks, numbered along the model; `Schedule.stage_of` says which stage holds each chunk.
A pipeline stage (a rank of axis pp) runs its instructions in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

from megazero.errors import MegazeroError


class ScheduleError(MegazeroError):
    """A schedule or program that cannot run: work is missing, out of order, or waits forever."""


class Op(Enum):
    """An operation on a chunk. The values are the letters of printed schedules.

    Backward is either one action (`BACKWARD`) or split in two (`INPUT`, later `WEIGHT`; Qi et al. 2023,
    "Zero Bubble Pipeline Parallelism"), never both for one micro-batch and chunk.

    `REDUCE` names the last micro-batch that it sums. Before the end of that micro-batch's backward, it makes
    the backward reduce each bucket as soon as it is complete; after it, it reduces all buckets at once.
    """

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    INPUT = "I"  # gradient of the chunk's input only
    WEIGHT = "W"  # gradients of the weights only
    GATHER = "G"  # all-gather the chunk's parameters (ZeRO stage 3)
    RELEASE = "R"  # free the gathered parameters
    REDUCE = "S"  # start to sum the chunk's gradients over the data-parallel ranks

    @property
    def computes(self) -> bool:
        """Whether this is forward or backward work, as opposed to collective communication."""
        return self in (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT)

    @property
    def ends_backward(self) -> bool:
        """Whether this completes the micro-batch's gradients for the chunk and frees its activations."""
        return self in (Op.BACKWARD, Op.WEIGHT)

    @property
    def uses_weights(self) -> bool:
        """Whether this reads the chunk's parameters; the weight gradient of a linear layer does not."""
        return self in (Op.FORWARD, Op.BACKWARD, Op.INPUT)


@dataclass(frozen=True)
class Action:
    """One operation on one chunk for one micro-batch. Chunks are numbered along the whole model."""

    op: Op
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order of forward and backward work on every stage, as pure data without messages.

    Attributes:
        kind: the name that `build_schedule` knows it by.
        stages: number of pipeline stages (the size of axis pp).
        microbatches: number of micro-batches in one step on one data-parallel rank.
        stage_of: chunk -> the stage that holds it.
        actions: per stage, its computing actions in order.
    """

    kind: str
    stages: int
    microbatches: int
    stage_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def chunks(self) -> int:
        """Number of chunks in the whole model."""
        return len(self.stage_of)

    @property
    def chunks_per_stage(self) -> int:
        """Number of chunks on each stage."""
        return self.chunks // self.stages

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that `stage` holds, in model order."""
        return tuple(chunk for chunk, holder in enumerate(self.stage_of) if holder == stage)

    @cached_property
    def backward_op(self) -> Op | None:
        """The op that computes a chunk's input gradient: `BACKWARD`, or `INPUT` if split; or None."""
        ops = {action.op for stage in self.actions for action in stage}
        return next((op for op in (Op.BACKWARD, Op.INPUT) if op in ops), None)

    @property
    def training(self) -> bool:
        """Whether the schedule has backward work."""
        return self.backward_op is not None

    def expected(self, stage: int) -> Iterator[Action]:
        """Yield every action that `stage` must run exactly once, in no particular order."""
        ops = {None: "F", Op.BACKWARD: "FB", Op.INPUT: "FIW"}[self.backward_op]
        for op in map(Op, ops):
            for chunk in self.chunks_of(stage):
                yield from (Action(op, chunk, m) for m in range(self.microbatches))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must end, on this or another stage, before `action` starts."""
        chunk, microbatch = action.chunk, action.microbatch
        if action.op is Op.FORWARD:
            return (Action(Op.FORWARD, chunk - 1, microbatch),) if chunk else ()
        if action.op is Op.WEIGHT:
            return (Action(Op.INPUT, chunk, microbatch),)
        own = Action(Op.FORWARD, chunk, microbatch)
        return (own,) if chunk == self.chunks - 1 else (own, Action(action.op, chunk + 1, microbatch))

    def message_from(self, action: Action) -> Message | None:
        """The message that carries `action`'s result to another stage; None if it stays on its stage."""
        kind: Literal["hidden", "grad"]
        if action.op is Op.FORWARD:
            kind, receiver = "hidden", action.chunk + 1
        elif action.op is self.backward_op:
            kind, receiver = "grad", action.chunk - 1
        else:
            return None
        if not 0 <= receiver < self.chunks or self.stage_of[receiver] == self.stage_of[action.chunk]:
            return None
        # Tags ascend along a micro-batch's way through the model and back.
        row = action.chunk if kind == "hidden" else 2 * self.chunks - 1 - action.chunk
        tag = row * self.microbatches + action.microbatch
        source, target = self.stage_of[action.chunk], self.stage_of[receiver]
        return Message(kind, action.chunk, action.microbatch, source, target, tag)

    def producer_of(self, message: Message) -> Action:
        """The action whose result `message` carries."""
        op = Op.FORWARD if message.kind == "hidden" else self.backward_op
        assert op is not None, "a schedule without backward has no gradients to send"
        return Action(op, message.chunk, message.microbatch)


@dataclass(frozen=True)
class Message:
    """A tensor `[s, b, h]` sent from one stage to another: a chunk's output, or the gradient of its input.

    Attributes:
        kind: ``hidden`` goes to the next chunk, ``grad`` to the previous one.
        chunk: the chunk that produced the tensor.
        microbatch: number of the micro-batch.
        source: stage that sends.
        target: stage that receives.
        tag: a number that is unique among the messages of a step.
    """

    kind: Literal["hidden", "grad"]
    chunk: int
    microbatch: int
    source: int
    target: int
    tag: int

    @property
    def receiver(self) -> int:
        """The chunk that reads the message."""
        return self.chunk + 1 if self.kind == "hidden" else self.chunk - 1

    def __str__(self) -> str:
        return f"{self.kind} {self.chunk}.{self.microbatch} from stage {self.source} to {self.target}"


@dataclass(frozen=True)
class Exchange:
    """Sends to and receives from one other stage, all started together and not waited for."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, sends first."""
        return self.sends + self.receives

    def __str__(self) -> str:
        parts = [f"send {message}" for message in self.sends]
        return "; ".join(parts + [f"receive {message}" for message in self.receives])


Instruction = Action | Exchange


@dataclass(frozen=True)
class Program:
    """A schedule lowered to instructions: `stages[s]` is what stage s executes, in order."""

    schedule: Schedule
    stages: tuple[tuple[Instruction, ...], ...]
