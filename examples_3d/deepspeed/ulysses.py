"""Sequences split over ranks: `DistributedAttention` around a local attention."""

import deepspeed
import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import distributed, nn
from torch.nn.functional import scaled_dot_product_attention

LENGTH, HEADS, WIDTH = 8, 4, 4


def local_attention(query, key, value):
    """Attention over whole sequences, for this rank's heads; tensors are [batch, length, heads, width]."""
    rows = (each.transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    """One layer of attention over a part of each sequence."""

    def __init__(self, group):
        super().__init__()
        self.inputs, self.out = nn.Linear(8, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 1)
        self.attention = DistributedAttention(local_attention, group, scatter_idx=2, gather_idx=1)

    def forward(self, x):
        query, key, value = self.inputs(x).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        return self.out(self.attention(query, key, value, 0).flatten(2))


if __name__ == "__main__":
    deepspeed.init_distributed()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = Model(distributed.new_group(list(range(size))))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    count = torch.arange(1.0, LENGTH + 1)[:, None]
    draw, losses = torch.Generator().manual_seed(3), []
    for _ in range(20):
        whole = torch.randn(8, LENGTH, 8, generator=draw)
        x, wanted = (
            t.chunk(size, 1)[rank].to(engine.device) for t in (whole, whole.cumsum(1)[..., :1] / count)
        )
        loss = (engine(x) - wanted).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / size)
    if rank == 0:
        print("losses:", losses)
