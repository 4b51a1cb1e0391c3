"""Runs one stage's instructions: where a schedule meets tensors. A single stage is a pipeline of one.

The executor decides nothing. The program says when to compute, send, gather and reduce; shapes are those of
each micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.loss import LossTerm
from megazero.mpu import Group, Transfer, Work
from megazero.pipeline.actions import Action, Exchange, Message, Op, Program

Deferred = list[Callable[[], nn.Parameter]]
Key = tuple[int, int]  # (chunk, micro-batch)


class Chunk(Protocol):
    """A contiguous part of the model."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the whole model; the same on all ranks, in the same order."""

    def hidden_shape(self, batch: object) -> tuple[int, ...]:
        """The shape of the hidden states between chunks, for this micro-batch."""

    def run(
        self, batch: object, hidden: Tensor | None, *, deferred: Deferred | None
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Compute the chunk for a micro-batch.

        Args:
            batch: the micro-batch.
            hidden: hidden states of the previous chunk; None for the first.
            deferred: collects the computation of weight gradients, which backward then leaves out.

        Returns:
            The chunk's hidden states, or None from the last chunk; and what it adds up over the micro-batch,
            by name. To loss terms it adds float32 scalars, equal on all tensor-parallel ranks. Other names
            are tallies: tensors that are only added up, such as how many tokens each expert got here.
        """


class Sharding(Protocol):
    """Keeps the parameters and sums the gradients (see `zero.DataParallel`)."""

    def start(self, step: int) -> None:
        """Begin a step of this number."""

    def gather(self, chunk: int, *, backward: bool) -> None:
        """Note that the chunk's forward or backward is about to run."""

    def release(self, chunk: int) -> None:
        """Note that the chunk does not compute for now."""

    def begin_backward(self, chunk: int, *, reduce: bool, ends: bool) -> None:
        """Note that the gradients that appear from now on are this chunk's.

        Args:
            chunk: the chunk.
            reduce: whether they complete sums, each of which is then reduced as soon as it is complete.
            ends: whether this is the last backward to bring gradients of its micro-batch.
        """

    def collect(self, param: nn.Parameter) -> None:
        """Take ``param.grad``."""

    def end_backward(self) -> None:
        """Note that no more gradients appear."""

    def reduce(self, chunk: int) -> None:
        """Reduce the chunk's gradients that no backward has reduced."""

    def finish(self) -> None:
        """Wait until the step's sums are complete."""


Observer = Callable[[Action, float], None]


@dataclass(frozen=True)
class StepSums:
    """What one stage's chunks added up on this rank.

    Attributes:
        terms: float64 [terms], to each loss term.
        tallies: to each tally, by name.
    """

    terms: Tensor
    tallies: Mapping[str, Tensor]


class Executor:
    """One stage of the pipeline.

    Args:
        chunks: this stage's parts of the model, by their numbers along the model.
        pp: the ranks of the pipeline; the group rank is the stage.
        sharding: keeps parameters and sums gradients.
        device: the chunks' device.
        observer: called with every action and its seconds, without the time spent waiting for other stages.
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
        names = [term.name for term in self.terms]
        assert len(set(names)) == len(names), f"loss terms must have names of their own: {names}"
        self.pp = pp
        self.sharding = sharding
        self.device = device
        self.observer = observer

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the whole model, which may change between steps."""
        return next(iter(self.chunks.values())).terms

    def train(self, program: Program, batches: Sequence, factors: Tensor, step: int = 0) -> StepSums:
        """Compute gradients of the terms' sums, each times its factor, summed over micro-batches and ranks.

        Args:
            program: a program for this number of micro-batches.
            batches: the micro-batches, the same on every stage.
            factors: each term's factor, float32 [terms].
            step: number of the step, for what is random in its sums.

        Returns:
            What this stage's chunks added to each term, before any factor is applied, and to tallies.
        """
        run = _Run(self, program, batches, factors.unbind())
        self.sharding.start(step)
        run.all()
        self.sharding.finish()
        return StepSums(run.totals, run.tallies)

    @torch.no_grad()
    def evaluate(self, program: Program, batches: Sequence) -> StepSums:
        """Compute the same sums with a forward-only program."""
        run = _Run(self, program, batches, None)
        run.all()
        return StepSums(run.totals, run.tallies)


@dataclass
class _Sent:
    """Sends in flight. Holding the tensors keeps their memory from being reused."""

    works: list[Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Live:
    """What a forward leaves for its backward."""

    hidden: Tensor | None  # the leaf that the chunk started from
    results: list[GradientEdge]  # the chunk's hidden states, except in the last one, and its weighted terms
    deferred: Deferred | None


@dataclass
class _Run:
    """One pass through a program."""

    executor: Executor
    program: Program
    batches: Sequence
    factors: Sequence[Tensor] | None  # each term's factor; None during evaluation
    live: dict[Key, _Live] = field(default_factory=dict)
    inbox: dict[tuple[str, Key], tuple[Tensor, Work | None]] = field(default_factory=dict)
    outbox: dict[tuple[str, Key], Tensor] = field(default_factory=dict)
    sent: list[_Sent] = field(default_factory=list)
    announced: set[Key] = field(default_factory=set)  # backwards that will reduce when they run
    ended: set[Key] = field(default_factory=set)
    waited: float = 0.0  # seconds spent waiting for messages

    def __post_init__(self) -> None:
        schedule = self.program.schedule
        assert schedule.microbatches == len(self.batches), (
            f"a program for {schedule.microbatches} micro-batches was given {len(self.batches)}"
        )
        self.stage = self.executor.pp.rank
        self.instructions = self.program.stages[self.stage]
        self.split = any(isinstance(i, Action) and i.op is Op.WEIGHT for i in self.instructions)
        self.terms = terms = self.executor.terms
        self.places = {term.name: i for i, term in enumerate(terms)}
        self.tallies: dict[str, Tensor] = {}
        self.totals = torch.zeros(len(terms), dtype=torch.float64, device=self.executor.device)

    def all(self) -> None:
        """Carry out every instruction, then wait for the last sends."""
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
        left = [*self.live, *self.inbox, *self.outbox, *self.announced]
        assert not left, f"the program left {left} undone"

    def act(self, action: Action) -> None:
        """Carry out one computation, or the gather, release or reduction that goes with it."""
        sharding, key = self.executor.sharding, (action.chunk, action.microbatch)
        match action.op:
            case Op.FORWARD:
                self.forward(key)
            case Op.BACKWARD | Op.INPUT:
                self.backward(key)
            case Op.WEIGHT:
                self.weight_gradients(key)
            case Op.GATHER:
                sharding.gather(action.chunk, backward=key in self.live)
            case Op.RELEASE:
                sharding.release(action.chunk)
            case Op.REDUCE if key in self.ended:
                sharding.reduce(action.chunk)
            case Op.REDUCE:
                self.announced.add(key)

    def forward(self, key: Key) -> None:
        """Compute a chunk for a micro-batch."""
        chunk, batch = self.executor.chunks[key[0]], self.batches[key[1]]
        hidden = None if key[0] == 0 else self._take("hidden", (key[0] - 1, key[1]))
        training = self.factors is not None
        if hidden is not None and training:
            hidden.requires_grad_()
        deferred: Deferred | None = [] if training and self.split else None
        result, sums = chunk.run(batch, hidden, deferred=deferred)
        last = key[0] == self.program.schedule.chunks - 1
        assert (result is None) == last, f"chunk {key[0]} must give hidden states unless it is the last"
        if result is not None:
            self._hand_over("hidden", key, key[0] + 1, result.detach())
        for name, value in sums.items():
            if name in self.places:
                self.totals[self.places[name]].add_(value.detach())
            else:
                tally = self.tallies.setdefault(name, torch.zeros_like(value, requires_grad=False))
                tally.add_(value.detach())
        if training:
            trained = [name for name in sums if name in self.places and self.terms[self.places[name]].trained]
            # Keep only the edges, so that hidden states that were sent do not stay in memory.
            weighted = [sums[name] * self.factors[self.places[name]] for name in trained]
            starts = [*([] if last else [result]), *weighted]
            self.live[key] = _Live(hidden, [get_gradient_edge(x) for x in starts], deferred)

    def backward(self, key: Key) -> None:
        """Run a chunk's backward for a micro-batch, or only the input's gradient if backward is split."""
        live = self.live[key]
        last = key[0] == self.program.schedule.chunks - 1
        # None lets a scalar start with 1. Tensors would make torch import sympy, which takes seconds.
        received = [] if last else [self._take("grad", (key[0] + 1, key[1]))]
        gradients = received + [None] * (len(live.results) - len(received))
        self._begin_backward(key, ends=not self.split)
        torch.autograd.backward(live.results, gradients)
        self.executor.sharding.end_backward()
        if key[0] > 0:
            self._hand_over("grad", key, key[0] - 1, live.hidden.grad)
        if self.split:
            live.hidden = None
        else:
            del self.live[key]

    def weight_gradients(self, key: Key) -> None:
        """Compute the weight gradients that backward deferred."""
        live = self.live.pop(key)
        sharding = self.executor.sharding
        self._begin_backward(key, ends=True)
        for compute in live.deferred:
            sharding.collect(compute())
        live.deferred.clear()
        sharding.end_backward()

    def exchange(self, exchange: Exchange) -> None:
        """Start sends and receives, after waiting for all sends but the latest exchange's."""
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

    def _begin_backward(self, key: Key, *, ends: bool) -> None:
        reduce = ends and key in self.announced
        self.executor.sharding.begin_backward(key[0], reduce=reduce, ends=ends)
        if ends:
            self.ended.add(key)
            self.announced.discard(key)

    def _hand_over(self, kind: str, key: Key, target: int, tensor: Tensor) -> None:
        """Pass a tensor to the neighboring chunk: by message, or directly if that is on this stage."""
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
        """A buffer to receive a message in. Hidden states and their gradients have the same shape."""
        batch = self.batches[message.microbatch]
        chunk = next(iter(self.executor.chunks.values()))
        return torch.empty(chunk.hidden_shape(batch), dtype=chunk.hidden_dtype, device=self.executor.device)
