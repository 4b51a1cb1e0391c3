"""Update rules for tests: asking for norms of whole parameters, summing gradients themselves, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megazero.optim.elementwise import Sgd
from megazero.optim.rule import Needs, NormRule


@dataclass(frozen=True)
class Lars(NormRule):
    """Momentum whose length is that of the weights: ``u = momentum u + g``, ``p = p (1 - lr wd) - lr c u``.

    With ``c = |p| / |u|`` over the whole parameter, and 1 where either is 0.
    """

    needs: ClassVar[Needs] = Needs(norms=("weight", "update"))
    state_names: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.9

    @torch.no_grad()
    def prepare(self, pieces):
        pieces.check(self.state_names)
        for param, grad, momentum in zip(pieces.params, pieces.grads, pieces.of("momentum"), strict=True):
            yield param, momentum.mul_(self.momentum).add_(grad)

    @torch.no_grad()
    def step(self, pieces, lr, norms, exempt):
        pieces.check(self.state_names)
        lists = (pieces.params, pieces.of("momentum"), pieces.weight_decays, norms)
        for param, momentum, decay, (weight, update) in zip(*lists, strict=True):
            ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
            param.mul_(1.0 - lr * decay)
            param.sub_(momentum * (lr * ratio).float())


@dataclass(frozen=True)
class SelfSumming(Sgd):
    """SGD that sums gradients over the replicas by itself, exactly."""

    needs: ClassVar[Needs] = Needs(reduces=True)

    def sums_exactly(self, step):
        return False

    def reduce(self, grads, state, *, replicas, step):
        replicas.group.all_reduce(grads).wait()


@dataclass(frozen=True)
class SelfSummingLars(Lars):
    """`Lars` that sums gradients over the replicas by itself, exactly."""

    needs: ClassVar[Needs] = Needs(norms=("weight", "update"), reduces=True)

    def sums_exactly(self, step):
        return False

    def reduce(self, grads, state, *, replicas, step):
        replicas.group.all_reduce(grads).wait()
