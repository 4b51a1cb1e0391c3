"""megatron-core's MoELayer with its sequential experts, as its grouped ones need Transformer Engine."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.contenders.megatron import config_of
from benchmarks.contenders.moe import LayerShape, stepper


def build(shape: LayerShape, rank: int, world_size: int):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module

    moe_utils.te_general_gemm = None  # 0.16.1 asks for it, but defines it with Transformer Engine only

    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    torch.manual_seed(0)
    config = replace(
        config_of(shape),
        num_moe_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.width,
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="allgather",  # the other one needs CUDA streams
        moe_expert_capacity_factor=shape.capacity,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        expert_model_parallel_size=world_size,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=shape.experts, moe_grouped_gemm=False)
    layer = build_module(spec, config=config).to(shape.device, shape.torch_dtype)
    step = stepper(layer, shape.hidden_states(rank), lambda x: layer(x)[0])

    def on_device() -> float:
        # It makes its tensors on "the current CUDA device".
        with mock.patch.object(torch.cuda, "current_device", return_value=torch.device(shape.device)):
            return step()

    return on_device
