"""Update rules for tests: asking for norms of whole parameters, summing gradients themselves, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megazero.optim import Needs, Sgd
from megazero.optim.rule import check_pieces, zeros_like


@dataclass(frozen=True)
class Lars:
    """Momentum whose length is that of the weights: ``u = momentum u + g``, ``p = p (1 - lr wd) - lr c u``.

    With ``c = |p| / |u|`` over the whole parameter, and 1 where either is 0.
    """

    needs: ClassVar[Needs] = Needs(norms=("weight", "update"))

    momentum: float = 0.9

    @property
    def state_names(self):
        return ("momentum",)

    def init_state(self, like):
        return zeros_like(self.state_names, like)

    @torch.no_grad()
    def prepare(self, params, grads, states, *, step, weight_decays):
        check_pieces(self.state_names, params, grads, states, step, weight_decays)
        for param, grad, state in zip(params, grads, states, strict=True):
            yield param, state["momentum"].mul_(self.momentum).add_(grad)

    @torch.no_grad()
    def step(self, params, grads, states, *, step, lr, weight_decays, norms, exempt):
        check_pieces(self.state_names, params, grads, states, step, weight_decays)
        for param, state, decay, (weight, update) in zip(params, states, weight_decays, norms, strict=True):
            ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
            param.mul_(1.0 - lr * decay)
            param.sub_(state["momentum"] * (lr * ratio).float())


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
