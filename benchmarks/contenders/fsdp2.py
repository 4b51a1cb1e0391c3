"""PyTorch's FSDP2 (`fully_shard`) on the plain GPT, a unit per layer and one for the vocabulary.

FSDP2 offers two choices. `reshard`: parameters are freed after each use and gathered for the next
(ZeRO stage 3), or stay gathered from the first forward of a step to its last backward. `each`: gradients are
reduced and sharded with every micro-batch (stages 2 and 3), or summed whole and reduced with the last one.
The default of both communicates least.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.contenders import Shape
from benchmarks.contenders.plain import PlainGPT


def _sharded(shape: Shape, rank: int, world_size: int, reshard: bool) -> nn.Module:
    if shape.device == "cuda":
        torch.cuda.set_device(rank)
    options = {
        "mesh": init_device_mesh(shape.device, (world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=shape.torch_dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": reshard,
    }
    model = PlainGPT(shape).to(shape.device)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def build(shape: Shape, rank: int, world_size: int, reshard: bool = False, each: bool = False):
    model = _sharded(shape, rank, world_size, reshard)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        raise RuntimeError("`parameters` must all be sharded, but some are whole; check `fully_shard`.")
    batches = shape.batches(rank)

    def step() -> float:
        for i, (tokens, labels) in enumerate(batches):
            last = i == len(batches) - 1
            model.set_requires_gradient_sync(last or each)
            model.set_reshard_after_backward(last or reshard)
            model.set_is_last_backward(last)
            loss = model(tokens, labels)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
