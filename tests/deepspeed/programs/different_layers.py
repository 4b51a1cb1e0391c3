"""At ZeRO stage 3, each rank runs as many of a model's layers as its number says: `python ... backward`.

`backward` trains so, `evaluation` computes losses only. Without a check, the rank with more layers would
wait for a gather that the other never makes.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import deepspeed
import torch
from torch import nn


class Early(nn.Module):
    """Rank 0 leaves after the first layer, rank 1 after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        return x.square().mean()


deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=4))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
torch.manual_seed(0)
model = Early()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
depth = 1 + deepspeed.comm.get_rank()
if sys.argv[1] == "evaluation":
    with torch.no_grad():
        engine(torch.ones(2, 8), depth)
else:
    engine.backward(engine(torch.ones(2, 8), depth))
    engine.step()
print("no error", flush=True)
