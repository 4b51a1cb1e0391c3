"""transformers' MixtralSparseMoeBlock, whole on each rank."""

from __future__ import annotations

import torch

from benchmarks.contenders.moe import LayerShape, stepper


def build(shape: LayerShape, rank: int, world_size: int):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.topk,
    )
    layer = MixtralSparseMoeBlock(config).to(shape.device, shape.torch_dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return stepper(layer, shape.hidden_states(rank), lambda x: layer(x.transpose(0, 1).contiguous()))
