"""Models of DeepSeek's own sizes, on the meta device: their numbers of weights are those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.checkpoint.described import check_described
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.config_json import architecture_of
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.spec.resolve import model_spec

COMMON = {
    **{"position_embedding_type": "rope", "multi_latent_attention": True, "qk_layernorm": True},
    **{"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "seq_length": 4096},
    **{"untie_embeddings_and_output_weights": True, "kv_lora_rank": 512},
}
V3 = ModelConfig(
    **COMMON,
    **{"vocab_size": 129280, "num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128},
    **{"ffn_hidden_size": 18432, "q_lora_rank": 1536, "num_experts": (256,), "moe_router_topk": 8},
    **{"moe_layer_freq": (0,) * 3 + (1,) * 58, "moe_ffn_hidden_size": 2048},
    moe_shared_expert_intermediate_size=2048,
)
V2_LITE = ModelConfig(
    **COMMON,
    **{"vocab_size": 102400, "num_layers": 27, "hidden_size": 2048, "num_attention_heads": 16},
    **{"ffn_hidden_size": 10944, "num_experts": (64,), "moe_router_topk": 6},
    **{"moe_layer_freq": (0,) + (1,) * 26, "moe_ffn_hidden_size": 1408},
    moe_shared_expert_intermediate_size=2816,
)
FURTHER = V3.model_copy(update={"mtp_num_layers": 1})


def shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    placement = replace(Placement.of(solo_context(), torch.bfloat16), device=torch.device("meta"))
    model = GPT(Slice(model_spec(config), (config.vocab_size, config.vocab_size), placement))
    return [spec_of(parameter).shape for parameter in model.parameters()]


def weights(config: ModelConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes(config))


def test_deepseeks_models_have_as_many_weights():
    """671B, 15.7B, and a further layer with its join and three norms, which shares embedding and head."""
    assert weights(V3) == 671_026_404_352
    assert weights(V2_LITE) == 15_706_484_224
    deeper = V3.model_copy(update={"num_layers": 62, "moe_layer_freq": (*V3.moe_layer_freq, 1)})
    assert weights(FURTHER) - weights(deeper) == 2 * 7168 * 7168 + 3 * 7168


def test_transformers_counts_the_same():
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        theirs = DeepseekV3ForCausalLM(DeepseekV3Config())
    assert sum(parameter.numel() for parameter in theirs.parameters()) == weights(V3)


@pytest.mark.parametrize("config", [V3, FURTHER, V2_LITE], ids=["v3", "further", "lite"])
def test_a_description_may_say_no_more_than_its_tensors_hold(config):
    """A folder's own description fits; one of more layers, or wider small vectors, is refused."""
    layers, vocab, values = config.further_layers.stop, config.vocab_size, config.num_attention_heads * 10**12
    check_described(config, vocab, shapes(config), layers, "x")
    for changes, says in (
        ({"mtp_num_layers": 10**15}, r"`num_layers` makes 1000000000000\d+, and they are of at most"),
        ({"kv_lora_rank": 10**12}, r"it makes at least \d+ weights, and they hold"),
        ({"v_head_dim": 10**12}, f"`num_attention_heads` makes {values}, and none has more than"),
    ):
        with pytest.raises(CheckpointError, match=says):
            check_described(config.model_copy(update=changes), vocab, shapes(config), layers, "x")


def test_no_architecture_of_transformers_takes_it_for_another_model():
    with pytest.raises(CheckpointError, match="`multi_latent_attention` must be False, but is True"):
        architecture_of(V2_LITE)
    plain = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, mtp_num_layers=1)
    with pytest.raises(CheckpointError, match="`mtp_num_layers` must be None, but is 1"):
        architecture_of(plain)
