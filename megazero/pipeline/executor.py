"""Runs one stage's instructions: where a schedule meets tensors. A single stage is a pipeline of one.

The executor decides nothing. The program says when to compute, send, gather and reduce; shapes are those of
each micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.loss import LossTerm
from megazero.mpu.group import Group, Transfer, Work
from megazero.pipeline.actions import Action, Exchange, Message, Op, Program
from megazero.pipeline.chunk import Chunk, ChunkResult, Deferred
from megazero.pipeline.sharding import Gathering, Sharding

Key = tuple[int, int]  # (chunk, micro-batch)
Kind = Literal["hidden", "grad"]
B = TypeVar("B")
Observer = Callable[[Action, float], None]


@dataclass(frozen=True)
class StepSums:
    """The sums of one stage's chunks on this rank.

    Attributes:
        terms: the sum for each loss term, float64 [terms].
        tallies: the sum for each tally, by name.
        outputs: the outputs of each micro-batch that has some here, by its number; training keeps none.
    """

    terms: Tensor
    tallies: Mapping[str, Tensor]
    outputs: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


class Evaluator(Generic[B]):
    """One stage of the pipeline, forwards only.

    Args:
        chunks: this stage's parts of the model, by their numbers along the model.
        pp: the ranks of the pipeline; the group rank is the stage.
        device: the chunks' device.
        gathering: makes parameters whole; None where they always are, and programs gather nothing.
        observer: called with every action and its seconds, without the time spent waiting for other stages.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk[B]],
        pp: Group,
        device: torch.device,
        gathering: Gathering | None = None,
        observer: Observer | None = None,
    ):
        self.chunks = dict(chunks)
        names = [term.name for term in self.terms]
        assert len(set(names)) == len(names), f"loss terms must have names of their own: {names}"
        self.pp = pp
        self.device = device
        self.gathering = gathering
        self.observer = observer

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the whole model, which may change between steps."""
        return next(iter(self.chunks.values())).terms

    @torch.no_grad()
    def evaluate(self, program: Program, batches: Sequence[B]) -> StepSums:
        """Run a forward-only program, and return the sums and outputs of this stage's chunks.

        Args:
            program: a program for this number of micro-batches.
            batches: the micro-batches, the same on every stage.
        """
        run = _Forwards(self, program, batches)
        run.all()
        return StepSums(run.totals, run.tallies, run.outputs)


class Executor(Evaluator[B]):
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
        chunks: Mapping[int, Chunk[B]],
        pp: Group,
        sharding: Sharding,
        device: torch.device,
        observer: Observer | None = None,
    ):
        super().__init__(chunks, pp, device, sharding, observer)
        self.sharding = sharding

    def train(self, program: Program, batches: Sequence[B], factors: Tensor, step: int = 0) -> StepSums:
        """Compute gradients of the terms' sums, each times its factor, summed over micro-batches and ranks.

        Args:
            program: a program for this number of micro-batches.
            batches: the micro-batches, the same on every stage.
            factors: each term's factor, float32 [terms].
            step: number of the step, for what is random in its sums.

        Returns:
            The sums of this stage's chunks: for each term, before any factor is applied, and for tallies.
        """
        run = _Training(self, program, batches, self.sharding, factors.unbind())
        self.sharding.start(step)
        run.all()
        # Only here: reductions of early buckets overlap the backwards of later ones.
        self.sharding.finish()
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
    """The values that a forward leaves for its backward."""

    hidden: Tensor | None  # the leaf that the chunk started from
    results: list[GradientEdge]  # the chunk's hidden states, except in the last one, and its weighted terms
    deferred: Deferred


class _Forwards(Generic[B]):
    """One pass through a program, as far as it computes no gradients."""

    def __init__(self, executor: Evaluator[B], program: Program, batches: Sequence[B]):
        schedule = program.schedule
        assert schedule.microbatches == len(batches), (
            f"a program for {schedule.microbatches} micro-batches was given {len(batches)}"
        )
        self.executor = executor
        self.program = program
        self.batches = batches
        self.stage = executor.pp.rank
        self.terms = terms = executor.terms
        self.places = {term.name: i for i, term in enumerate(terms)}
        self.tallies: dict[str, Tensor] = {}
        self.outputs: dict[int, Mapping[str, Tensor]] = {}
        self.totals = torch.zeros(len(terms), dtype=torch.float64, device=executor.device)
        self.inbox: dict[tuple[Kind, Key], tuple[Tensor, Work | None]] = {}
        self.outbox: dict[tuple[Kind, Key], Tensor] = {}
        self.sent: list[_Sent] = []
        self.waited = 0.0  # seconds spent waiting for messages

    def all(self) -> None:
        """Carry out every instruction, then wait for the last sends."""
        for instruction in self.program.stages[self.stage]:
            if isinstance(instruction, Exchange):
                self.exchange(instruction)
            elif self.executor.observer is None:
                self.act(instruction)
            else:
                began, waited = time.perf_counter(), self.waited
                self.act(instruction)
                waited = self.waited - waited
                self.executor.observer(instruction, time.perf_counter() - began - waited)
        # Nobody else holds these tensors, and memory must not be reused while it is being sent.
        for sent in self.sent:
            sent.wait()
        left = self.undone()
        assert not left, f"the program left {left} undone"

    def undone(self) -> list[object]:
        """The work that instructions have begun and none has ended."""
        return [*self.inbox, *self.outbox]

    def act(self, action: Action) -> None:
        """Carry out one computation, or the gather or release that goes with it."""
        gathering, key = self.executor.gathering, (action.chunk, action.microbatch)
        if action.op is Op.FORWARD:
            self.forward(key)
        elif gathering is not None and action.op is Op.GATHER:
            gathering.gather(action.chunk, backward=False)
        elif gathering is not None and action.op is Op.RELEASE:
            gathering.release(action.chunk)
        else:
            raise AssertionError(f"a stage that only evaluates cannot do {action}")

    def forward(self, key: Key) -> None:
        """Compute a chunk for a micro-batch."""
        hidden = None if key[0] == 0 else self._take("hidden", (key[0] - 1, key[1]))
        result = self.compute(key, hidden)
        last = key[0] == self.program.schedule.chunks - 1
        assert (result is None) == last, f"chunk {key[0]} must give hidden states unless it is the last"
        if result is not None:
            # Detached: each chunk's backward starts at its own edges, and gradients travel as messages.
            self._hand_over("hidden", key, key[0] + 1, result.detach())

    def compute(self, key: Key, hidden: Tensor | None) -> Tensor | None:
        """The hidden states that a chunk makes of `hidden`; its sums are added up, its outputs kept."""
        chunk, batch = self.executor.chunks[key[0]], self.batches[key[1]]
        result = chunk.run(batch, hidden, deferred=None)
        self.add_up(result)
        if result.outputs:
            self.outputs[key[1]] = result.outputs
        return result.hidden

    def add_up(self, result: ChunkResult) -> None:
        """Add a chunk's sums to terms and tallies."""
        for name, value in result.terms.items():
            self.totals[self.places[name]].add_(value.detach())
        for name, value in result.tallies.items():
            tally = self.tallies.setdefault(name, torch.zeros_like(value, requires_grad=False))
            tally.add_(value.detach())

    def exchange(self, exchange: Exchange) -> None:
        """Start sends and receives, after waiting for all sends but the latest exchange's."""
        # Waiting here, and not where a tensor is sent, lets the latest sends run while the next chunk
        # computes. Waiting for the older ones bounds the memory of what is on the way. It cannot lock: all
        # stages reach exchanges in one order (`lower.add_transfers`), so the other end has come to these.
        while len(self.sent) > 1:
            self.sent.pop(0).wait()
        outgoing = [self.outbox.pop((m.kind, (m.chunk, m.microbatch))) for m in exchange.sends]
        incoming = [self._buffer(m) for m in exchange.receives]
        transfers = [
            *(Transfer("send", t, m.target, m.tag) for m, t in zip(exchange.sends, outgoing, strict=True)),
            *(Transfer("recv", t, m.source, m.tag) for m, t in zip(exchange.receives, incoming, strict=True)),
        ]
        # Together, so that where two stages send to each other, neither waits for the other to send first.
        works = self.executor.pp.exchange(transfers)
        if outgoing:
            self.sent.append(_Sent(works[: len(outgoing)], outgoing))
        for m, tensor, work in zip(exchange.receives, incoming, works[len(outgoing) :], strict=True):
            self.inbox[m.kind, (m.chunk, m.microbatch)] = tensor, work

    def _hand_over(self, kind: Kind, key: Key, target: int, tensor: Tensor) -> None:
        """Pass a tensor to the neighboring chunk: by message, or directly if that is on this stage."""
        tensor = tensor.contiguous()
        if self.program.schedule.stage_of[target] == self.stage:
            self.inbox[kind, key] = tensor, None
        else:
            self.outbox[kind, key] = tensor

    def _take(self, kind: Kind, key: Key) -> Tensor:
        # A receive is posted when its exchange comes and awaited when its tensor is read, so that the message
        # travels during the instructions in between. It has no work if the sender is a chunk of this stage.
        tensor, work = self.inbox.pop((kind, key))
        if work is not None:
            began = time.perf_counter()
            work.wait()
            self.waited += time.perf_counter() - began
        return tensor

    def _buffer(self, message: Message) -> Tensor:
        """A buffer for a message: for what the next chunk takes, or the gradient of what this one gave."""
        chunks, batch = self.executor.chunks, self.batches[message.microbatch]
        if message.kind == "hidden":
            boundary = chunks[message.chunk + 1].takes(batch)
        else:
            boundary = chunks[message.chunk - 1].gives(batch)
        return boundary.empty(self.executor.device)


class _Training(_Forwards[B]):
    """One pass through a program with backwards, whose gradients `sharding` takes."""

    def __init__(
        self,
        executor: Evaluator[B],
        program: Program,
        batches: Sequence[B],
        sharding: Sharding,
        factors: Sequence[Tensor],  # each term's
    ):
        super().__init__(executor, program, batches)
        self.sharding = sharding
        self.factors = factors
        instructions = program.stages[self.stage]
        self.split = any(isinstance(i, Action) and i.op is Op.WEIGHT for i in instructions)
        self.live: dict[Key, _Live] = {}
        self.announced: set[Key] = set()  # backwards that will reduce when they run
        self.ended: set[Key] = set()

    def undone(self) -> list[object]:
        """The work that instructions have begun and none has ended."""
        return [*self.live, *super().undone(), *self.announced]

    def act(self, action: Action) -> None:
        """Carry out one computation, or the gather, release or reduction that goes with it."""
        sharding, key = self.sharding, (action.chunk, action.microbatch)
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

    def compute(self, key: Key, hidden: Tensor | None) -> Tensor | None:
        """The hidden states that a chunk makes of `hidden`; keeps what its backward starts from."""
        chunk, batch = self.executor.chunks[key[0]], self.batches[key[1]]
        if hidden is not None:
            hidden.requires_grad_()  # a leaf, whose `grad` is the message to the previous chunk
        deferred: Deferred = []
        result = chunk.run(batch, hidden, deferred=deferred if self.split else None)
        self.add_up(result)
        trained = [name for name in result.terms if self.terms[self.places[name]].trained]
        # Keep only the edges, so that hidden states that were sent do not stay in memory.
        weighted = [result.terms[name] * self.factors[self.places[name]] for name in trained]
        starts = weighted if result.hidden is None else [result.hidden, *weighted]
        self.live[key] = _Live(hidden, [get_gradient_edge(x) for x in starts], deferred)
        return result.hidden

    def backward(self, key: Key) -> None:
        """Run a chunk's backward for a micro-batch, or only the input's gradient if backward is split."""
        live = self.live[key]
        last = key[0] == self.program.schedule.chunks - 1
        # None lets a scalar start with 1. Tensors would make torch import sympy, which takes seconds.
        received = [] if last else [self._take("grad", (key[0] + 1, key[1]))]
        gradients = [*received, *[None] * (len(live.results) - len(received))]
        # Before autograd runs: hooks of parameters ask then whose gradients they bring, and what to reduce.
        self._begin_backward(key, ends=not self.split)
        torch.autograd.backward(live.results, gradients)
        self.sharding.end_backward()
        if live.hidden is not None:
            assert live.hidden.grad is not None, f"chunk {key[0]} must read its hidden states"
            self._hand_over("grad", key, key[0] - 1, live.hidden.grad)
        if self.split:
            live.hidden = None  # its gradient is on the way; the weight half needs what `deferred` keeps
        else:
            del self.live[key]

    def weight_gradients(self, key: Key) -> None:
        """Compute the weight gradients that backward deferred."""
        live = self.live.pop(key)
        self._begin_backward(key, ends=True)
        for compute in live.deferred:
            self.sharding.collect(compute())
        live.deferred.clear()
        self.sharding.end_backward()

    def _begin_backward(self, key: Key, *, ends: bool) -> None:
        # REDUCE before its backward asks to reduce each bucket as soon as it is complete, in the midst of the
        # backward; after it, to reduce what is then there. The input half of a split backward completes
        # nothing, so only the last half may reduce.
        reduce = ends and key in self.announced
        self.sharding.begin_backward(key[0], reduce=reduce, ends=ends)
        if ends:
            self.ended.add(key)
            self.announced.discard(key)
