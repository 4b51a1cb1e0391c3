"""The work of a planned rank: kernels, calls between ranks and waits, in the sections of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.account.profilers.calls import CollectiveCall
from megazero.pipeline.actions import Action, Exchange, Instruction, Op, Program

ActionKey = tuple[Op, int, int, int]
"""(op, the chunk's place on its stage, micro-batch, number of the same actions before)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of megazero, or an operator of torch.

    Attributes:
        name: torch's name of an operator (``mm``, ``add``), or a kernel's name (``layer_norm_forward``).
        nbytes: bytes read and written, each tensor counted once.
        flops: two for each multiply-add of matrix products, none for other arithmetic.
        dtype: the dtype of the factors of a product, or of the largest tensor.
        sizes: (m, n, k) of a matrix product of [m, k] and [k, n]; None for others.
        batch: the number of such products.
    """

    name: str
    nbytes: int
    flops: float = 0
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int, int] | None = None
    batch: int = 1


@dataclass(frozen=True)
class Wait:
    """A wait for an asynchronous call; `call` is the call's number."""

    call: int


Task = Kernel | CollectiveCall | Wait


@dataclass(frozen=True)
class StepSection:
    """The work of one action, or of the update.

    Attributes:
        work: kernels and calls in the order of their start, without messages between stages.
        most: the peak of the bytes of operators' results, above the section's beginning.
        left: bytes of results at the section's end, above its beginning; negative if more are freed than
            made.
        seconds: the kernels' time, if they ran and were timed.
    """

    work: tuple[Task, ...]
    most: int
    left: int
    seconds: float | None = None

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        return sum(work.flops for work in self.work if isinstance(work, Kernel))


NOTHING = StepSection((), 0, 0)


class MessageFacts(NamedTuple):
    """Facts about the messages of one kind that a chunk sends or receives.

    Attributes:
        nbytes: the bytes of one message.
        until: the op on this chunk and the same micro-batch at whose end the message is freed; None if a
            later exchange frees it.
    """

    nbytes: int
    until: Op | None


@dataclass(frozen=True)
class Trace:
    """The step of a rank, as a function of the number of its micro-batches.

    Attributes:
        micro_batches: the number of traced micro-batches.
        chunks: the number of chunks of the model on the rank's stage.
        tail: the update, after the last action.
        actions: sections by (op, the chunk's place on the stage, micro-batch, number of the same actions
            before); weights are gathered for forward, and again for backward.
        messages: by (``send`` or ``recv``, kind, the place of this stage's chunk).
        resting: bytes by place and kind that the rank holds between steps, and its buffers.
        buffers: bytes of the buffers that sections count as well.
    """

    micro_batches: int
    chunks: int
    tail: StepSection
    actions: Mapping[ActionKey, StepSection]
    messages: Mapping[tuple[str, str, int], MessageFacts]
    resting: Mapping[str, Mapping[str, int]]
    buffers: int

    @property
    def boundary(self) -> int:
        """Bytes of the largest message between stages; 0 with a single stage."""
        return max((facts.nbytes for facts in self.messages.values()), default=0)

    def steps(self, program: Program, stage: int) -> Iterator[tuple[Instruction | None, StepSection | None]]:
        """Yield (instruction, section) of a step of any length, on a stage with the same kinds of parts.

        Exchanges have no section, and the update, at the end, has no instruction.
        """
        for instruction, key in keyed(program, stage):
            yield instruction, None if key is None else self.like(key, program.schedule.microbatches)
        yield None, self.tail

    def like(self, key: ActionKey, micro_batches: int) -> StepSection:
        """The traced section that does the same as an action of a step of `micro_batches` micro-batches."""
        op, place, number, times = key
        last, middle = self.micro_batches - 1, self.micro_batches // 2
        if micro_batches != self.micro_batches:
            number = 0 if number == 0 else last if number == micro_batches - 1 else middle
        likest = ((op, place, n, t) for t in (times, 0) for n in (number, middle, last, 0))
        return next((self.actions[k] for k in likest if k in self.actions), NOTHING)


def keyed(program: Program, stage: int) -> Iterator[tuple[Instruction, ActionKey | None]]:
    """Yield the instructions of a stage with the keys of their sections; exchanges have no key."""
    before: Counter[Action] = Counter()
    chunks = program.schedule.chunks_of(stage)
    for instruction in program.stages[stage]:
        if isinstance(instruction, Exchange):
            yield instruction, None
            continue
        place = chunks.index(instruction.chunk)
        yield instruction, (instruction.op, place, instruction.microbatch, before[instruction])
        before[instruction] += 1
