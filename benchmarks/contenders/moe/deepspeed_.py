"""DeepSpeed's MoE layer, which always has a capacity; dropless is its `drop_tokens=False`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders.moe import LayerShape, stepper


class _Expert(nn.Module):
    def __init__(self, shape: LayerShape):
        super().__init__()
        self.up = nn.Linear(shape.hidden, 2 * shape.width, bias=False)
        self.down = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


def build(shape: LayerShape, rank: int, world_size: int):
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layer = MoE(
        shape.hidden,
        _Expert(shape),
        num_experts=shape.experts,
        ep_size=world_size,
        k=shape.topk,
        capacity_factor=shape.capacity or 1.0,
        drop_tokens=shape.capacity is not None,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    return stepper(layer, shape.hidden_states(rank), lambda x: layer(x)[0])
