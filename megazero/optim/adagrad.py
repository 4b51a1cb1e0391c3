"""Adagrad, whose step shrinks with the sum of all squared gradients so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megazero.ops.adagrad import adagrad_step
from megazero.optim.rule import Needs, PassEnds, UpdateRule, check_pieces, zeros_like


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    """Adagrad (Duchi et al. 2011), element by element: ``s = s + g^2``, ``p = p - lr g / (sqrt(s) + eps)``.

    As in torch's Adagrad and DeepSpeed's, weight decay is a part of the gradient: ``g + wd p`` stands for g.
    """

    needs: ClassVar[Needs] = Needs(one_pass=True)

    eps: float = 1e-10

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("sum",)

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return zeros_like(self.state_names, like)

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        step: int,
        lr: float,
        weight_decays: Sequence[float],
        ends: PassEnds | None = None,
    ) -> None:
        ends = check_pieces(self.state_names, params, grads, states, step, weight_decays, ends)
        facts = {"lr": lr, "eps": self.eps, "scale": ends.scale}
        pieces = zip(params, grads, states, ends.weights, weight_decays, strict=True)
        for param, grad, state, weights, decay in pieces:
            adagrad_step(param, grad, state["sum"], weights, **facts, weight_decay=decay)
