"""Runs one stage's instructions on tensors. Without pipeline parallelism there is one stage.

The executor decides nothing: the program says when to compute, send, gather and reduce, and each micro-batch
says its shapes.
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
from megazero.pipeline.chunk import Chunk, ChunkResult, Deferred, Sharding

Key = tuple[int, int]  # (chunk, micro-batch)
Kind = Literal["hidden", "grad"]
B = TypeVar("B")
Observer = Callable[[Action, float], None]


@dataclass(frozen=True)
class StepSums:
    """The sums of one stage's chunks on this rank.

    Attributes:
        terms: the sum of each loss term, float64 [terms].
        tallies: name -> the sum of that tally.
        outputs: number of a micro-batch -> its outputs on this stage; empty in training.
    """

    terms: Tensor
    tallies: Mapping[str, Tensor]
    outputs: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


class Evaluator(Generic[B]):
    """One stage of the pipeline, forwards only.

    Args:
        chunks: number along the model -> chunk, for the chunks of this stage.
        pp: the ranks of the pipeline; the group rank is the stage.
        gathering: gathers sharded parameters; None if no parameter is sharded.
        observer: called with every action and its seconds, without the time spent waiting for other stages.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk[B]],
        pp: Group,
        device: torch.device,
        gathering: Sharding | None = None,
        observer: Observer | None = None,
    ):
        self.chunks = dict(chunks)
        names = [term.name for term in self.terms]
        assert len(set(names)) == len(names), f"loss terms must have unique names: {names}"
        self.pp = pp
        self.device = device
        self.gathering = gathering
        self.observer = observer

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the whole model; they may change between steps."""
        return next(iter(self.chunks.values())).terms

    @torch.no_grad()
    def evaluate(self, program: Program, batches: Sequence[B]) -> StepSums:
        """Run a forward-only program and return the sums and outputs of this stage's chunks.

        Args:
            program: a program for `len(batches)` micro-batches.
            batches: the micro-batches, the same on every stage.
        """
        run = _Forwards(self, program, batches)
        run.all()
        return StepSums(run.totals, run.tallies, run.outputs)


class Executor(Evaluator[B]):
    """One stage of the pipeline, forwards and backwards.

    Args:
        chunks, pp, device, observer: as for `Evaluator`.
        sharding: the sharded parameters and the sums of their gradients.
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
        """Compute the gradients of the weighted loss terms, summed over micro-batches and ranks.

        Args:
            program: a program for `len(batches)` micro-batches.
            batches: the micro-batches, the same on every stage.
            factors: the weight of each loss term, float32 [terms].
            step: number of the step, which seeds stochastic rounding of gradients.

        Returns:
            The sums of this stage's chunks, loss terms unweighted.
        """
        run = _Training(self, program, batches, self.sharding, factors.unbind())
        self.sharding.start(step)
        run.all()
        # Not earlier: reductions of early buckets overlap the backwards of later ones.
        self.sharding.finish()
        return StepSums(run.totals, run.tallies)


@dataclass
class _Sent:
    """Sends in flight; references to the tensors keep their memory from being reused."""

    works: list[Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Live:
    """The values that a forward keeps for its backward."""

    hidden: Tensor | None  # the chunk's input, a leaf; None in the first chunk
    results: list[GradientEdge]  # of the output (except in the last chunk), and of the weighted loss terms
    deferred: Deferred


class _Forwards(Generic[B]):
    """One run of a forward-only program."""

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
        self.term_index = {term.name: i for i, term in enumerate(terms)}
        self.tallies: dict[str, Tensor] = {}
        self.outputs: dict[int, Mapping[str, Tensor]] = {}
        self.totals = torch.zeros(len(terms), dtype=torch.float64, device=executor.device)
        self.inbox: dict[tuple[Kind, Key], tuple[Tensor, Work | None]] = {}
        self.outbox: dict[tuple[Kind, Key], Tensor] = {}
        self.sent: list[_Sent] = []
        self.waited = 0.0  # seconds spent waiting for messages

    def all(self) -> None:
        """Execute every instruction, then wait for the last sends."""
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
        # These are the only references to tensors in flight, whose memory must not be reused.
        for sent in self.sent:
            sent.wait()
        left = self.undone()
        assert not left, f"the program left {left} undone"

    def undone(self) -> list[object]:
        """Messages that were produced or received and never used; empty after a complete program."""
        return [*self.inbox, *self.outbox]

    def act(self, action: Action) -> None:
        """Execute one forward, gather or release."""
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
        """Receive a chunk's input, run the chunk, and pass its output on."""
        hidden = None if key[0] == 0 else self._take("hidden", (key[0] - 1, key[1]))
        result = self.compute(key, hidden)
        last = key[0] == self.program.schedule.chunks - 1
        assert (result is None) == last, f"chunk {key[0]} must return hidden states unless it is the last"
        if result is not None:
            # Detached: each chunk has a backward of its own, and messages carry gradients between chunks.
            self._hand_over("hidden", key, key[0] + 1, result.detach())

    def compute(self, key: Key, hidden: Tensor | None) -> Tensor | None:
        """Run a chunk, add its terms and tallies to the sums, and return its hidden states."""
        chunk, batch = self.executor.chunks[key[0]], self.batches[key[1]]
        result = chunk.run(batch, hidden, deferred=None)
        self.add_up(result)
        if result.outputs:
            self.outputs[key[1]] = result.outputs
        return result.hidden

    def add_up(self, result: ChunkResult) -> None:
        """Add a chunk's terms and tallies to the sums."""
        for name, value in result.terms.items():
            self.totals[self.term_index[name]].add_(value.detach())
        for name, value in result.tallies.items():
            tally = self.tallies.setdefault(name, torch.zeros_like(value, requires_grad=False))
            tally.add_(value.detach())

    def exchange(self, exchange: Exchange) -> None:
        """Start sends and receives, after waiting for all sends except those of the latest exchange."""
        # The latest sends run while the next chunk computes; waiting for the older ones bounds the memory of
        # tensors in flight. This cannot deadlock: all stages reach exchanges in the same order
        # (`lower.add_transfers`), so the receiver has already posted the older ones.
        while len(self.sent) > 1:
            self.sent.pop(0).wait()
        outgoing = [self.outbox.pop((m.kind, (m.chunk, m.microbatch))) for m in exchange.sends]
        incoming = [self._buffer(m) for m in exchange.receives]
        transfers = [
            *(Transfer("send", t, m.target, m.tag) for m, t in zip(exchange.sends, outgoing, strict=True)),
            *(Transfer("recv", t, m.source, m.tag) for m, t in zip(exchange.receives, incoming, strict=True)),
        ]
        # Started together, so that two stages that send to each other cannot both wait to receive first.
        works = self.executor.pp.exchange(transfers)
        if outgoing:
            self.sent.append(_Sent(works[: len(outgoing)], outgoing))
        for m, tensor, work in zip(exchange.receives, incoming, works[len(outgoing) :], strict=True):
            self.inbox[m.kind, (m.chunk, m.microbatch)] = tensor, work

    def _hand_over(self, kind: Kind, key: Key, target: int, tensor: Tensor) -> None:
        """Pass a tensor to the neighboring chunk: as a message, or directly if it is on this stage."""
        tensor = tensor.contiguous()
        if self.program.schedule.stage_of[target] == self.stage:
            self.inbox[kind, key] = tensor, None
        else:
            self.outbox[kind, key] = tensor

    def _take(self, kind: Kind, key: Key) -> Tensor:
        """Remove a tensor from the inbox, after waiting for its message."""
        # A receive is posted at its exchange and awaited here, so that the instructions in between hide it.
        # `work` is None if the tensor comes from a chunk of this stage.
        tensor, work = self.inbox.pop((kind, key))
        if work is not None:
            began = time.perf_counter()
            work.wait()
            self.waited += time.perf_counter() - began
        return tensor

    def _buffer(self, message: Message) -> Tensor:
        """Allocate the tensor of an incoming message."""
        chunk, batch = self.executor.chunks[message.receiver], self.batches[message.microbatch]
        hidden = message.kind == "hidden"
        boundary = chunk.input_boundary(batch) if hidden else chunk.output_boundary(batch)
        return boundary.empty(self.executor.device)


class _Training(_Forwards[B]):
    """One run of a program with backwards; `sharding` collects the gradients."""

    def __init__(
        self,
        executor: Evaluator[B],
        program: Program,
        batches: Sequence[B],
        sharding: Sharding,
        factors: Sequence[Tensor],  # one for each loss term
    ):
        super().__init__(executor, program, batches)
        self.sharding = sharding
        self.factors = factors
        instructions = program.stages[self.stage]
        self.split = any(isinstance(i, Action) and i.op is Op.WEIGHT for i in instructions)
        self.live: dict[Key, _Live] = {}
        self.announced: set[Key] = set()  # backwards that will reduce when they run
        self.ended: set[Key] = set()  # backwards that have run

    def undone(self) -> list[object]:
        """Forwards without backward, unused messages, and reductions whose backward never ran."""
        return [*self.live, *super().undone(), *self.announced]

    def act(self, action: Action) -> None:
        """Execute one computation, gather, release or reduction."""
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
        """Run a chunk, keep the edges from which its backward starts, and return its hidden states."""
        chunk, batch = self.executor.chunks[key[0]], self.batches[key[1]]
        if hidden is not None:
            hidden.requires_grad_()  # a leaf; its `grad` becomes the message to the previous chunk
        deferred: Deferred = []
        result = chunk.run(batch, hidden, deferred=deferred if self.split else None)
        self.add_up(result)
        indices = {name: self.term_index[name] for name in result.terms}
        weighted = [result.terms[n] * self.factors[i] for n, i in indices.items() if self.terms[i].trained]
        # Keep edges, not tensors, so that the memory of hidden states is freed once they are sent.
        starts = weighted if result.hidden is None else [result.hidden, *weighted]
        self.live[key] = _Live(hidden, [get_gradient_edge(x) for x in starts], deferred)
        return result.hidden

    def backward(self, key: Key) -> None:
        """Run a chunk's backward for a micro-batch; only its input gradient if backward is split."""
        live = self.live[key]
        last = key[0] == self.program.schedule.chunks - 1
        received = [] if last else [self._take("grad", (key[0] + 1, key[1]))]
        # None lets a scalar start with 1; tensors would make torch import sympy, which takes seconds.
        gradients = [*received, *[None] * (len(live.results) - len(received))]
        # Before autograd runs, because parameters' hooks need to know the chunk and whether to reduce.
        self._begin_backward(key, ends=not self.split)
        torch.autograd.backward(live.results, gradients)
        self.sharding.end_backward()
        if live.hidden is not None:
            assert live.hidden.grad is not None, f"chunk {key[0]} must read its hidden states"
            self._hand_over("grad", key, key[0] - 1, live.hidden.grad)
        if self.split:
            live.hidden = None  # the weight half needs only what `deferred` holds
        else:
            del self.live[key]

    def weight_gradients(self, key: Key) -> None:
        """Compute the weight gradients that a split backward deferred."""
        live = self.live.pop(key)
        self._begin_backward(key, ends=True)
        for compute in live.deferred:
            self.sharding.collect(compute())
        live.deferred.clear()
        self.sharding.end_backward()

    def _begin_backward(self, key: Key, *, ends: bool) -> None:
        # A REDUCE that precedes its backward asks for each bucket to be reduced during it, once complete. The
        # input half of a split backward completes no gradient, so only the weight half may reduce.
        reduce = ends and key in self.announced
        self.sharding.begin_backward(key[0], reduce=reduce, ends=ends)
        if ends:
            self.ended.add(key)
            self.announced.discard(key)
