"""megazero's `MoEMLP`, the experts shared by all ranks."""

from __future__ import annotations

import torch

from benchmarks.contenders.moe import LayerShape, stepper
from benchmarks.contenders.ours import join_context
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.moe.mlp import MoEMLP
from megazero.mpu.malloc import keep_freed_memory
from megazero.spec.resolve import model_spec


def build(shape: LayerShape, rank: int, world_size: int, dispatcher: str = "alltoall"):
    keep_freed_memory()  # as a training does
    parallel = ParallelConfig(expert_model_parallel_size=world_size, device=shape.device)
    context = join_context(shape, rank, world_size, parallel)
    config = ModelConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=shape.sequence,
        activation="swiglu",
        add_bias_linear=False,
        num_experts=(shape.experts,),
        moe_ffn_hidden_size=shape.width,
        moe_router_topk=shape.topk,
        moe_expert_capacity_factor=shape.capacity,
        moe_router_load_balancing_type=("aux_loss",),
        moe_aux_loss_coeff=(0.01,),
    )
    placement = Placement.of(context, shape.torch_dtype, token_dispatcher=dispatcher)
    layer = MoEMLP(0, model_spec(config).layers[0].mlp, placement)
    initialize(layer, 0, context.place)
    keys = torch.arange(shape.micro_batch) + rank
    inputs = LayerInputs(Rows(range(shape.sequence), keys=keys.to(shape.device)))
    return stepper(layer, shape.hidden_states(rank), lambda x: layer(x, inputs)[0])
