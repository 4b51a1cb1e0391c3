"""Small models with experts: shapes, and their tensors in the forms that files hold them in."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from tests.formats.hf.samples import LLAMA, TIED

EXPERTS = 3  # a number that divides nothing
MIXTRAL = LLAMA.model_copy(update={"num_experts": (EXPERTS,), "moe_router_topk": 2})
QWEN2_MOE = LLAMA.model_copy(
    update={
        "kv_channels": None,
        "add_qkv_bias": True,
        "num_experts": (EXPERTS,),
        "moe_router_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": 14,
        "moe_shared_expert_intermediate_size": 22,
        "moe_shared_expert_gate": True,
    }
)
NO_SHARED = {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
MODELS: Mapping[str, ModelConfig] = {
    "mixtral": MIXTRAL,
    "mixtral-tied": MIXTRAL.model_copy(update={**TIED, "moe_router_topk": 3}),
    "qwen2-moe": QWEN2_MOE,
    "qwen2-moe-normed": QWEN2_MOE.model_copy(update={"moe_router_pre_softmax": False, "add_qkv_bias": False}),
    "qwen2-moe-every-second": QWEN2_MOE.model_copy(update={"num_layers": 5, "expert_interval": 2}),
    "qwen2-moe-here-and-there": QWEN2_MOE.model_copy(
        update={"num_layers": 4, "moe_layer_freq": (0, 1, 1, 0)}
    ),
    "mixtral-window": MIXTRAL.model_copy(update={"window_size": (3, 0)}),
    "qwen2-moe-windows": QWEN2_MOE.model_copy(
        update={"window_size": (4, 0), "window_attn_skip_freq": (1, 0)}
    ),
    "qwen2-moe-not-shared": QWEN2_MOE.model_copy(update=NO_SHARED),
}
_HALVES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the form and with the names that transformers 5 has in memory."""
    out, experts = {}, {}
    for name, tensor in tensors.items():
        found = re.fullmatch(
            r"(model\.layers\.\d+\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", name
        )
        if found is None:
            out[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
        else:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
    for layer, matrices in experts.items():
        numbers = sorted({number for number, _ in matrices})
        gate, up, down = next(names for names in _HALVES if (0, names[0]) in matrices)
        both = [torch.cat([matrices[number, gate], matrices[number, up]]) for number in numbers]
        out[f"{layer}mlp.experts.gate_up_proj"] = torch.stack(both)
        out[f"{layer}mlp.experts.down_proj"] = torch.stack([matrices[number, down] for number in numbers])
    return out
