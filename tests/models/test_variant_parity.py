"""Variants of the layers against transformers' models that have them, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from tests.models.hf_weights import Weights, expert_by_expert, like_llama
from tests.models.test_hf_parity import LLAMA, TOKENS, TOLERANCE, VOCAB, YARN, run_ours

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the words of these configurations are those of version 5", allow_module_level=True)

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
ALTERNATING = {"window_size": (4, 0), "window_attn_skip_freq": (2,)}


def changed(**settings: Any) -> ModelConfig:
    return LLAMA.model_copy(update=settings)


QWEN3 = changed(qk_layernorm=True)
OLMO2 = changed(
    qk_layernorm=True,
    qk_layernorm_scope="projection",
    norm_position="output",
    untie_embeddings_and_output_weights=True,
)
GEMMA = {
    "norm_position": "both",
    "apply_layernorm_1p": True,
    "activation": "geglu",
    "embedding_multiplier": 6.0,
    "softmax_scale": 12**-0.5,
    **ALTERNATING,
}
GEMMA2 = changed(**GEMMA, attn_logit_softcapping=0.8, final_logit_softcapping=1.5)
GEMMA3 = changed(**GEMMA, qk_layernorm=True, window_rotary_base=30.0, rotary_seq_len_interpolation_factor=3.0)
GRANITE = changed(embedding_multiplier=3.0, softmax_scale=0.2, residual_multiplier=0.6, logits_multiplier=0.5)
GPT_OSS = changed(
    **{**YARN, **ALTERNATING, "mscale": 1.0, "mscale_all_dim": 0.0, "add_bias_linear": True},
    activation="quick_geglu",
    glu_linear_offset=1.0,
    activation_func_clamp_value=0.4,
    softmax_type="learnable",
    num_experts=(4,),
    moe_ffn_hidden_size=14,
)
COHERE2 = changed(
    **ALTERNATING,
    normalization="LayerNorm",
    norm_bias=False,
    kv_channels=None,
    use_parallel_residual=True,
    share_parallel_norm=True,
    rotary_interleaved=True,
    no_rope_freq=(2,),
    logits_multiplier=0.6,
)
_EITHER: Mapping[str, str] = {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp.down": "mlp.down_proj",
}
_BEFORE = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_AROUND = {**_AFTER, "input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


def rope(base: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **scaling}


def gemma_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        **like_llama(config, VOCAB[0]),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 12,
        "layer_types": SLIDING,
        "sliding_window": 5,
        "pad_token_id": None,  # its embedding would learn nothing
    }


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**like_llama(QWEN3, VOCAB[0])))


def olmo2() -> nn.Module:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**like_llama(OLMO2, VOCAB[0])))


def gemma2() -> nn.Module:
    fields = {
        **gemma_fields(GEMMA2),
        "attn_logit_softcapping": GEMMA2.attn_logit_softcapping,
        "final_logit_softcapping": GEMMA2.final_logit_softcapping,
        "attn_implementation": "eager",
    }
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**fields))


def gemma3() -> nn.Module:
    fields = {
        **gemma_fields(GEMMA3),
        "rope_parameters": {
            "full_attention": rope(500.0, rope_type="linear", factor=3.0),
            "sliding_attention": rope(30.0),
        },
    }
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**fields))


def granite() -> nn.Module:
    fields = {
        **like_llama(GRANITE, VOCAB[0]),
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    }
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**fields))


def cohere2() -> nn.Module:
    fields = {
        **like_llama(COHERE2, VOCAB[0]),
        "layer_norm_eps": COHERE2.norm_epsilon,
        "logit_scale": 0.6,
        "layer_types": SLIDING,
        "sliding_window": 5,
        "pad_token_id": None,
    }
    return transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**fields))


def gpt_oss() -> nn.Module:
    fields = {
        **like_llama(GPT_OSS, VOCAB[0]),
        "attention_bias": True,
        "layer_types": SLIDING,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 14,
        "swiglu_limit": 0.4,
        "attn_implementation": "eager",
    }
    return expert_by_expert(transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields)))


SHAPES: Mapping[str, tuple[ModelConfig, Callable[[], nn.Module], Mapping[str, str]]] = {
    "qwen3": (QWEN3, qwen3, _BEFORE),
    "olmo2": (OLMO2, olmo2, _AFTER),
    "gemma2": (GEMMA2, gemma2, _AROUND),
    "gemma3": (GEMMA3, gemma3, _AROUND),
    "granite": (GRANITE, granite, _BEFORE),
    "cohere2": (COHERE2, cohere2, _BEFORE),
    "gpt-oss": (GPT_OSS, gpt_oss, _BEFORE),
}


def projections(kind: str, whole: Tensor, config: ModelConfig) -> Weights:
    """q, k and v of [g, q + 2, d, ...], the queries of each group first."""
    queries = config.num_attention_heads // config.kv_heads
    parts = whole.split((queries, 1, 1), 1)
    names = ("q_proj", "k_proj", "v_proj")
    return {f"self_attn.{n}.{kind}": p.flatten(0, 2) for n, p in zip(names, parts, strict=True)}


def of_layer(name: str, weight: Tensor, config: ModelConfig, norms: Mapping[str, str]) -> Weights:
    """A weight of a layer under transformers' names."""
    part, _, kind = name.rpartition(".")
    if part == "attention.qkv":
        return projections(kind, weight, config)
    if name == "attention.softmax_offset":
        return {"self_attn.sinks": weight}
    if part == "mlp.up":
        return {f"mlp.{n}_proj.{kind}": weight[i] for i, n in enumerate(("gate", "up"))}
    if part == "mlp.router":
        return {"mlp.router.weight": weight, "mlp.router.bias": torch.zeros(len(weight))}
    if part.startswith("mlp.experts"):
        matrix = "gate_up_proj" if part.endswith("up") else "down_proj"
        if part.endswith("up"):  # [E, 2, f, ...] -> [E, 2 f, ...], gate and value by turns
            weight = weight.transpose(1, 2).flatten(1, 2)
        if kind == "bias":
            return {f"mlp.experts.{matrix}_bias": weight}
        return {f"mlp.experts.{matrix}": weight.transpose(1, 2)}
    return {f"{({**_EITHER, **norms})[part]}.{kind}": weight}


def to_theirs(weights: Weights, config: ModelConfig, norms: Mapping[str, str]) -> Weights:
    words = weights["embedding.word.weight"]
    out = {"model.embed_tokens.weight": words, "lm_head.weight": weights.get("head.weight", words)}
    out["model.norm.weight"] = weights["final_norm.weight"]
    for name, weight in weights.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            for theirs, tensor in of_layer(rest, weight, config, norms).items():
                out[f"model.layers.{number}.{theirs}"] = tensor
    return out


@pytest.mark.parametrize(
    ("shape", "tp"),
    [(shape, 1) for shape in SHAPES] + [("olmo2", 2), ("gemma3", 2), ("cohere2", 2), ("gpt-oss", 2)],
)
def test_logits_gradients_and_greedy_tokens_agree(shape, tp):
    """On two ranks gradients are not summed up here: tests/equivalence/test_variant_layouts.py."""
    config, make, norms = SHAPES[shape]
    logits, _, weights, gradients, tokens = run_ours(config, tp)
    theirs = make().eval()
    theirs.load_state_dict(to_theirs(weights, config, norms), strict=True)
    expected = theirs(TOKENS, labels=TOKENS)
    assert 0.2 < expected.logits.std() < 10  # neither dead nor saturated
    torch.testing.assert_close(logits, expected.logits[:, :-1].detach(), atol=TOLERANCE, rtol=0)

    expected.loss.backward()
    renamed = to_theirs(gradients, config, norms)
    for name, parameter in theirs.named_parameters():
        if tp > 1 or name.endswith("router.bias"):  # there is none here
            continue
        difference = (renamed[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 2 * TOLERANCE, f"gradient of {name} differs by {difference:.1e}"
    prompts = TOKENS[:, :9]
    alike = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert tokens == alike[:, 9:].tolist()
