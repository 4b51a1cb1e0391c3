"""Lion, which moves each element by the learning rate in the direction of a sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megazero.ops.lion import lion_step
from megazero.optim.rule import Needs, PassEnds, UpdateRule, check_pieces, zeros_like


@dataclass(frozen=True)
class Lion(UpdateRule):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    ``p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)``, then ``m = b2 m + (1 - b2) g``.
    """

    needs: ClassVar[Needs] = Needs(one_pass=True)

    beta1: float = 0.9
    beta2: float = 0.99

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg",)

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
        facts = {"lr": lr, "beta1": self.beta1, "beta2": self.beta2, "scale": ends.scale}
        pieces = zip(params, grads, states, ends.weights, weight_decays, strict=True)
        for param, grad, state, weights, decay in pieces:
            lion_step(param, grad, state["exp_avg"], weights, **facts, weight_decay=decay)
