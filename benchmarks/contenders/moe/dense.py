"""A dense SwiGLU MLP with as many FLOPs as a token's experts have together: what no mixture can beat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders.moe import LayerShape, stepper


class _Dense(nn.Module):
    def __init__(self, shape: LayerShape):
        super().__init__()
        width = shape.topk * shape.width
        self.up = nn.Linear(shape.hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


def build(shape: LayerShape, rank: int, world_size: int):
    torch.manual_seed(0)
    layer = _Dense(shape).to(shape.device, shape.torch_dtype)
    return stepper(layer, shape.hidden_states(rank), layer)
