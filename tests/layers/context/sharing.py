"""Layers' attention on ranks that share a sequence, as threads, beside attention on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megazero.layers.attention_cores import LocalCore
from megazero.layers.context.core import ExchangingCore, GatheringCore
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.rows import Rows, Spread
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import CountingGroup, TrafficLog
from megazero.ops.attention import Documents, Pattern, Slopes


@dataclass(frozen=True)
class Problem:
    """Attention of one layer: sizes, and which keys each query sees how."""

    length: int = 24
    batch: int = 2
    heads: int = 4
    groups: int = 2
    size: int = 8
    causal: bool = True
    pattern: Pattern = field(default_factory=Pattern)
    documents: Tensor | None = None
    dropout: float = 0.0
    slopes: bool = False
    offset: bool = False
    dtype: torch.dtype = torch.float64

    def tensors(self) -> list[Tensor]:
        """q, k, v and the result's gradient, of whole sequences."""
        random = torch.Generator().manual_seed(self.length)
        shapes = [(self.heads, self.size), (self.groups, self.size), (self.groups, self.size)]
        q, k, v = (
            torch.randn(self.length, self.batch, *shape, generator=random, dtype=torch.float64)
            for shape in shapes
        )
        grad = torch.randn(
            self.length, self.batch, self.heads * self.size, generator=random, dtype=torch.float64
        )
        return [x.to(self.dtype) for x in (q, k, v, grad)]

    def attend(self, core: AttentionCore, spread: Spread) -> list[Tensor]:
        """The result, the gradients of q, k, v, and that of the offset, of the rows that `spread` has."""
        *qkv, grad = (spread.own(x) for x in self.tensors())
        leaves = [x.clone().requires_grad_() for x in qkv]
        offset = torch.linspace(-1, 1, self.heads, dtype=self.dtype).requires_grad_()
        keys = torch.arange(self.batch) + 5 if self.dropout else None
        ids = self.documents
        documents = None if ids is None else Documents(ids, None, ids.numpy())
        inputs = LayerInputs(Rows(range(self.length), documents, keys, spread=spread))
        slopes = Slopes(torch.linspace(0.1, 0.5, self.heads)) if self.slopes else None
        attends = Attends(0, self.causal, self.dropout, self.pattern)
        out = core(*leaves, inputs, attends, slopes, offset if self.offset else None)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves), offset.grad if self.offset else offset * 0]


Maker = Callable[[Group, Group, bool], AttentionCore]


def ring(solo: Group, group: Group, zigzag: bool) -> AttentionCore:
    return ExchangingCore(solo, SoloGroup(), group, zigzag)


def exchange(solo: Group, group: Group, zigzag: bool) -> AttentionCore:
    return ExchangingCore(solo, group, SoloGroup(), zigzag)


def gather(solo: Group, group: Group, zigzag: bool) -> AttentionCore:
    return GatheringCore(solo, group, zigzag)


def alone(problem: Problem) -> list[Tensor]:
    """What one rank computes."""
    solo = SoloGroup()
    return problem.attend(LocalCore(solo), Spread(solo))


def shared(
    problem: Problem, ranks: int, maker: Maker, zigzag: bool = True
) -> tuple[list[Tensor], list[TrafficLog]]:
    """What so many ranks compute, in the order of one's rows, and what each of them sent and got."""
    world, solo = ThreadWorld(ranks), SoloGroup()
    logs = [TrafficLog() for _ in range(ranks)]

    def work(rank: int) -> list[Tensor]:
        group = CountingGroup(world.group("cp", rank, tuple(range(ranks))), logs[rank], "cp")
        return problem.attend(maker(solo, group, zigzag), Spread(solo, False, group, group, zigzag))

    parts = world.run(work)
    order = Spread(solo, False, _Of(ranks), _Of(ranks), zigzag).gathered_order(problem.length)
    wholes = [torch.cat(pieces) for pieces in zip(*(part[:4] for part in parts), strict=True)]
    if order is not None:
        wholes = [torch.empty_like(x).index_copy_(0, order, x) for x in wholes]
    return [*wholes, sum(part[4] for part in parts)], logs


class _Of(SoloGroup):
    """A group of so many ranks, of which nothing is asked but their number."""

    def __init__(self, size: int):
        super().__init__()
        self.ranks = tuple(range(size))

    @property
    def size(self) -> int:
        return len(self.ranks)


__all__ = ["Problem", "alone", "exchange", "gather", "replace", "ring", "shared"]
