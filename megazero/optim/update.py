"""AdamW and SGD. Each element's update depends only on that element, so a tensor may be cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megazero.ops.adam import adam_step
from megazero.ops.sgd import sgd_step
from megazero.optim.rule import Needs, PassEnds, UpdateRule, check_pieces, zeros_like


@dataclass(frozen=True)
class Adam(UpdateRule):
    """AdamW: Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019).

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``.
    """

    needs: ClassVar[Needs] = Needs(one_pass=True)

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

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
        # The fused kernel takes one weight decay per call, and most models have two values.
        for decay in dict.fromkeys(weight_decays):
            chosen = [i for i, other in enumerate(weight_decays) if other == decay and params[i].numel() > 0]
            if chosen:
                adam_step(
                    [params[i] for i in chosen],
                    [grads[i] for i in chosen],
                    [states[i]["exp_avg"] for i in chosen],
                    [states[i]["exp_avg_sq"] for i in chosen],
                    [ends.weights[i] for i in chosen],
                    step=step,
                    lr=lr,
                    beta1=self.beta1,
                    beta2=self.beta2,
                    eps=self.eps,
                    weight_decay=decay,
                    scale=ends.scale,
                )


@dataclass(frozen=True)
class Sgd(UpdateRule):
    """SGD with heavy-ball momentum: ``u = momentum u + g + wd p``, ``p = p - lr u``.

    As in torch's SGD, which Megatron and DeepSpeed take, weight decay is a part of the gradient, and momentum
    carries it on.
    """

    needs: ClassVar[Needs] = Needs(one_pass=True)

    momentum: float = 0.9

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

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
        facts = {"lr": lr, "momentum": self.momentum, "scale": ends.scale}
        pieces = zip(params, grads, states, ends.weights, weight_decays, strict=True)
        for param, grad, state, weights, decay in pieces:
            sgd_step(param, grad, state.get("momentum"), weights, **facts, weight_decay=decay)
