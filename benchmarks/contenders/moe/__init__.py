"""Who is compared in `moe_layer.py`: one file per layer, with ``build(shape, rank, world_size) -> step``.

A step runs one layer forward and backward on a fixed batch of hidden states and returns the mean square of
its output. There is no optimizer, and gradients are dropped after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.contenders import Shape


@dataclass(frozen=True)
class LayerShape(Shape):
    """One layer with SwiGLU experts, as Mixtral has them, on [sequence, micro_batch, hidden].

    Attributes:
        experts: number of experts.
        topk: experts of a token.
        width: inner width of an expert.
        capacity: capacity factor; None drops nothing.
    """

    layers: int = 1
    accumulations: int = 1
    dtype: str = "fp32"
    experts: int = 8
    topk: int = 2
    width: int = 1024
    capacity: float | None = None

    def hidden_states(self, rank: int) -> Tensor:
        """[s, b, h], the same for all contenders."""
        generator = torch.Generator().manual_seed(rank)
        size = (self.sequence, self.micro_batch, self.hidden)
        return torch.randn(size, generator=generator).to(self.device, self.torch_dtype)


def stepper(layer: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> Callable[[], float]:
    """Forward and backward of `run`, which uses `layer`."""
    parameters = list(layer.parameters())

    def step() -> float:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        loss = run(x).float().square().mean()
        loss.backward()
        return float(loss.detach())

    x.requires_grad_()
    layer.train()
    return step
