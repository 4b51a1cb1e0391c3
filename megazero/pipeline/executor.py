"""Runs one stage's instructions: where a schedule meets tensors. One stage is a pipeline of one.

The executor decides nothing. What is computed when, sent when, gathered and reduced when is in the program;
shapes follow each micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.mpu import Group, Transfer, Work
from megazero.pipeline.actions import Action, Exchange, Message, Op, Program

Deferred = list[Callable[[], nn.Parameter]]
Key = tuple[int, int]  # (chunk, micro-batch)


class Chunk(Protocol):
    """A contiguous part of the model."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of the hidden states between chunks."""

    def hidden_shape(self, batch: object) -> tuple[int, ...]:
        """Of the hidden states between chunks, for this micro-batch."""

    def hidden(self, batch: object, hidden: Tensor | None, *, deferred: Deferred | None) -> Tensor:
        """This chunk's hidden states from those of the chunk before; None for the first chunk."""

    def loss(
        self, batch: object, hidden: Tensor | None, *, deferred: Deferred | None
    ) -> tuple[Tensor, Tensor]:
        """The last chunk's summed loss and number of counted positions; float32 scalars."""


class Sharding(Protocol):
    """What keeps the parameters and sums the gradients (see `zero.DataParallel`)."""

    def start(self) -> None:
        """A step begins."""

    def gather(self, chunk: int, *, backward: bool) -> None:
        """The chunk's forward or backward is about to run."""

    def release(self, chunk: int) -> None:
        """The chunk's computation is over for now."""

    def begin_backward(self, chunk: int, *, reduce: bool) -> None:
        """Gradients that appear are this chunk's; `reduce`: they complete what is to be reduced."""

    def collect(self, param: nn.Parameter) -> None:
        """Take ``param.grad``."""

    def end_backward(self) -> None:
        """The chunk's gradients of this micro-batch are all there."""

    def finish(self) -> None:
        """Return when the step's sums are complete."""


Observer = Callable[[Action, float], None]


class Executor:
    """One stage of the pipeline.

    Args:
        chunks: this stage's parts of the model, by their numbers along the model.
        pp: the ranks of the pipeline; group rank is the stage.
        sharding: keeps parameters and sums gradients.
        device: where the chunks are.
        observer: told of every action and its seconds, without what it waited for other stages.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        pp: Group,
        sharding: Sharding,
        device: torch.device,
        observer: Observer | None = None,
    ):
        self.chunks = dict(chunks)
        self.pp = pp
        self.sharding = sharding
        self.device = device
        self.observer = observer

    def train(self, program: Program, batches: Sequence, factor: float) -> Tensor:
        """Gradients of ``factor`` x the summed loss of `batches`, summed over micro-batches and ranks.

        Args:
            program: for as many micro-batches as there are.
            batches: the micro-batches, the same on every stage.
            factor: what each loss is multiplied by before backward.

        Returns:
            float64 [2]: sum of the losses and number of counted positions; zeros but
            on the last chunk's stage.
        """
        run = _Run(self, program, batches, factor)
        self.sharding.start()
        run.all()
        self.sharding.finish()
        return run.totals

    @torch.no_grad()
    def evaluate(self, program: Program, batches: Sequence) -> Tensor:
        """The same totals from a forward-only program."""
        run = _Run(self, program, batches, None)
        run.all()
        return run.totals


@dataclass
class _Sent:
    """Sends under way. Holding the tensors keeps their memory from being used again."""

    works: list[Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Live:
    """What one forward leaves for its backward."""

    hidden: Tensor | None  # the leaf that the chunk started from
    result: GradientEdge
    deferred: Deferred | None
    needs_gradient: bool  # False for the loss, which starts the backward pass


@dataclass
class _Run:
    """One pass through a program."""

    executor: Executor
    program: Program
    batches: Sequence
    factor: float | None  # None: evaluation
    live: dict[Key, _Live] = field(default_factory=dict)
    inbox: dict[tuple[str, Key], tuple[Tensor, Work | None]] = field(default_factory=dict)
    outbox: dict[tuple[str, Key], Tensor] = field(default_factory=dict)
    sent: list[_Sent] = field(default_factory=list)
    waited: float = 0.0  # seconds in which messages were awaited

    def __post_init__(self) -> None:
        schedule = self.program.schedule
        assert schedule.microbatches == len(self.batches), (
            f"a program for {schedule.microbatches} micro-batches was given {len(self.batches)}"
        )
        self.stage = self.executor.pp.rank
        self.instructions = self.program.stages[self.stage]
        self.split = any(isinstance(i, Action) and i.op is Op.WEIGHT for i in self.instructions)
        self.reduced = {
            (i.chunk, i.microbatch) for i in self.instructions if isinstance(i, Action) and i.op is Op.REDUCE
        }
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.executor.device)

    def all(self) -> None:
        """Carry out every instruction, then let the last sends go."""
        for instruction in self.instructions:
            if isinstance(instruction, Exchange):
                self.exchange(instruction)
            elif self.executor.observer is None:
                self.act(instruction)
            else:
                began, waited = time.perf_counter(), self.waited
                self.act(instruction)
                waited = self.waited - waited
                self.executor.observer(instruction, time.perf_counter() - began - waited)
        for sent in self.sent:
            sent.wait()
        left = [*self.live, *self.inbox, *self.outbox]
        assert not left, f"the program left {left} undone"

    def act(self, action: Action) -> None:
        """Carry out one computation, or what ZeRO does beside it."""
        sharding = self.executor.sharding
        if action.op is Op.FORWARD:
            self.forward((action.chunk, action.microbatch))
        elif action.op is Op.BACKWARD:
            self.backward((action.chunk, action.microbatch), reduce=self._reduces(action))
        elif action.op is Op.INPUT:
            self.backward((action.chunk, action.microbatch), reduce=False)
        elif action.op is Op.WEIGHT:
            self.weight_gradients((action.chunk, action.microbatch), reduce=self._reduces(action))
        elif action.op is Op.GATHER:
            sharding.gather(action.chunk, backward=(action.chunk, action.microbatch) in self.live)
        elif action.op is Op.RELEASE:
            sharding.release(action.chunk)
        # REDUCE was said to the backward before it, whose gradients are reduced as they appear.

    def forward(self, key: Key) -> None:
        """Compute a chunk for a micro-batch."""
        chunk, batch = self.executor.chunks[key[0]], self.batches[key[1]]
        hidden = None if key[0] == 0 else self._take("hidden", (key[0] - 1, key[1]))
        training = self.factor is not None
        if hidden is not None and training:
            hidden.requires_grad_()
        deferred: Deferred | None = [] if training and self.split else None
        last = key[0] == self.program.schedule.chunks - 1
        if last:
            loss, counted = chunk.loss(batch, hidden, deferred=deferred)
            self.totals += torch.stack([loss.detach(), counted]).double()
            result = loss * self.factor if training else loss
        else:
            result = chunk.hidden(batch, hidden, deferred=deferred)
            self._hand_over("hidden", key, key[0] + 1, result.detach())
        if training:
            # The edge alone, so that hidden states that were sent do not stay.
            self.live[key] = _Live(hidden, get_gradient_edge(result), deferred, not last)

    def backward(self, key: Key, *, reduce: bool) -> None:
        """Backward of a chunk for a micro-batch: all of it, or the input's gradient where it is split."""
        live = self.live[key]
        gradient = self._take("grad", (key[0] + 1, key[1])) if live.needs_gradient else None
        sharding = self.executor.sharding
        sharding.begin_backward(key[0], reduce=reduce)
        torch.autograd.backward(live.result, gradient)
        sharding.end_backward()
        if key[0] > 0:
            self._hand_over("grad", key, key[0] - 1, live.hidden.grad)
        if self.split:
            live.hidden = None
        else:
            del self.live[key]

    def weight_gradients(self, key: Key, *, reduce: bool) -> None:
        """Compute what backward deferred."""
        live = self.live.pop(key)
        sharding = self.executor.sharding
        sharding.begin_backward(key[0], reduce=reduce)
        for compute in live.deferred:
            sharding.collect(compute())
        live.deferred.clear()
        sharding.end_backward()

    def exchange(self, exchange: Exchange) -> None:
        """Start sends and receives. Only what was sent before the last exchange is waited for."""
        while len(self.sent) > 1:
            self.sent.pop(0).wait()
        outgoing = [self.outbox.pop((m.kind, (m.chunk, m.microbatch))) for m in exchange.sends]
        incoming = [self._buffer(m) for m in exchange.receives]
        transfers = [
            *(Transfer("send", t, m.target, m.tag) for m, t in zip(exchange.sends, outgoing, strict=True)),
            *(Transfer("recv", t, m.source, m.tag) for m, t in zip(exchange.receives, incoming, strict=True)),
        ]
        works = self.executor.pp.exchange(transfers)
        if outgoing:
            self.sent.append(_Sent(works[: len(outgoing)], outgoing))
        for m, tensor, work in zip(exchange.receives, incoming, works[len(outgoing) :], strict=True):
            self.inbox[m.kind, (m.chunk, m.microbatch)] = tensor, work

    def _reduces(self, action: Action) -> bool:
        return (action.chunk, action.microbatch) in self.reduced

    def _hand_over(self, kind: str, key: Key, target: int, tensor: Tensor) -> None:
        """To the neighbouring chunk: by message, or at once where it is on this stage."""
        tensor = tensor.contiguous()
        if self.program.schedule.stage_of[target] == self.stage:
            self.inbox[kind, key] = tensor, None
        else:
            self.outbox[kind, key] = tensor

    def _take(self, kind: str, key: Key) -> Tensor:
        tensor, work = self.inbox.pop((kind, key))
        if work is not None:
            began = time.perf_counter()
            work.wait()
            self.waited += time.perf_counter() - began
        return tensor

    def _buffer(self, message: Message) -> Tensor:
        """Where a message is received. Hidden states and their gradients have one shape."""
        batch = self.batches[message.microbatch]
        chunk = next(iter(self.executor.chunks.values()))
        return torch.empty(chunk.hidden_shape(batch), dtype=chunk.hidden_dtype, device=self.executor.device)
