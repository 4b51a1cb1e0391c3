"""Lion, of which each element moves by the learning rate in the direction of a sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megazero.ops.chunks import row_chunks
from megazero.optim.rule import Needs, check_pieces, zeros_like


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    ``p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)``, then ``m = b2 m + (1 - b2) g``.
    """

    needs: ClassVar[Needs] = Needs()

    beta1: float = 0.9
    beta2: float = 0.99

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return zeros_like(self.state_names, like)

    @torch.no_grad()
    def step(self, params, grads, states, *, step, lr, weight_decays) -> None:
        check_pieces(self.state_names, params, grads, states, step, weight_decays)
        for param, grad, state, decay in zip(params, grads, states, weight_decays, strict=True):
            tensors = [tensor.view(-1) for tensor in (param, grad, state["exp_avg"])]
            for chunk in row_chunks(param, param.numel(), 1):
                p, g, m = (tensor[chunk] for tensor in tensors)
                sign = torch.lerp(g, m, self.beta1).sign_()
                p.mul_(1.0 - lr * decay).sub_(sign, alpha=lr)
                m.lerp_(g, 1.0 - self.beta2)
