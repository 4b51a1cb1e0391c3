"""Adagrad, whose step shrinks with the sum of all squared gradients so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megazero.ops.chunks import row_chunks
from megazero.optim.rule import Needs, check_pieces, zeros_like


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi et al. 2011), element by element: ``s = s + g^2``, ``p = p - lr g / (sqrt(s) + eps)``.

    As in torch's Adagrad and DeepSpeed's, weight decay is a part of the gradient: ``g + wd p`` stands for g.
    """

    needs: ClassVar[Needs] = Needs()

    eps: float = 1e-10

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("sum",)

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return zeros_like(self.state_names, like)

    @torch.no_grad()
    def step(self, params, grads, states, *, step, lr, weight_decays) -> None:
        check_pieces(self.state_names, params, grads, states, step, weight_decays)
        for param, grad, state, decay in zip(params, grads, states, weight_decays, strict=True):
            tensors = [tensor.view(-1) for tensor in (param, grad, state["sum"])]
            for chunk in row_chunks(param, param.numel(), 1):
                p, g, s = (tensor[chunk] for tensor in tensors)
                g = g.add(p, alpha=decay) if decay else g
                s.addcmul_(g, g)
                p.addcdiv_(g, s.sqrt().add_(self.eps), value=-lr)
