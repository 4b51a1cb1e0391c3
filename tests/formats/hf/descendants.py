"""Small models of Llama's many descendants: what transformers is told to make, and what that is to us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megazero.config.tree.model import ModelConfig
from tests.formats.hf.samples import GPT2, LLAMA, VOCAB


@dataclass(frozen=True)
class Sample:
    """A model of transformers, and the same model in megazero.

    Attributes:
        name: the beginning of its classes' names, as in ``Qwen3Config`` and ``Qwen3ForCausalLM``.
        theirs: the arguments of the configuration.
        ours: the model's settings.
        config: the name of the configuration's class, if it begins otherwise.
    """

    name: str
    theirs: Mapping[str, Any]
    ours: ModelConfig
    config: str | None = None

    def build(self) -> nn.Module:
        """transformers' model with random weights, also where its initial weights are ones or zeros."""
        import transformers

        config = getattr(transformers, self.config or f"{self.name}Config")(
            **self.theirs, bos_token_id=1, eos_token_id=2, pad_token_id=None, attn_implementation="eager"
        )
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            drawn = torch.randn_like(parameter) * 0.15
            gain = (
                parameter.dim() == 1 and "bias" not in name and "Gemma" not in self.name
            )  # theirs are less 1
            parameter.data.copy_(drawn + (1.0 if gain else 0.0))
            if "embed_positions" in name:  # OPT's: no token has the first two
                parameter.data[:2] = 0.0
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
        return model


# Ragged on purpose: no two sizes alike, and nothing that is a default.
THEIRS = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 31,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 58,
    "rms_norm_eps": 3e-4,
    "initializer_range": 0.08,
    "attention_dropout": 0.3,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
BARE = LLAMA.model_copy(update={"kv_channels": None})
NORMED = {"qk_layernorm": True}
ALL_NORMED = {"qk_layernorm": True, "qk_layernorm_scope": "projection"}
EXPERTS = {"num_experts": (4,), "moe_router_topk": 2}
GEMMA = LLAMA.model_copy(
    update={
        **{"activation": "geglu", "apply_layernorm_1p": True, "norm_position": "both"},
        **{"embedding_multiplier": 6.0, "softmax_scale": 7**-0.5, "window_size": (3, 0)},
    }
)
GEMMA_THEIRS = {**THEIRS, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 4}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False},
    **{"beta_fast": 2.0, "beta_slow": 0.1, "rope_theta": 500.0},
}
OUR_YARN = {
    **{"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_beta_fast": 2.0},
    **{"yarn_original_max_position_embeddings": 8, "yarn_beta_slow": 0.1},
    "yarn_correction_range_round_to_int": False,
}
LISTED = ["sliding_attention", "full_attention"]

DEEPSEEK_THEIRS = {
    **{key: value for key, value in THEIRS.items() if key != "num_key_value_heads"},
    **{"kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    **{"rms_norm_eps": 1e-6, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 14},
    **{"n_shared_experts": 2, "num_key_value_heads": 6},
}
DEEPSEEK = LLAMA.model_copy(
    update={
        **{"kv_channels": None, "num_query_groups": None, "multi_latent_attention": True},
        **{"qk_layernorm": True, "kv_lora_rank": 14, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4},
        **{"v_head_dim": 10, "norm_epsilon": 1e-6, "num_layers": 3, "moe_layer_freq": (0, 1, 1)},
        **{"moe_ffn_hidden_size": 14, "moe_shared_expert_intermediate_size": 28},
    }
)

_NEOX_NAMES = ("intermediate_size", "layer_norm_eps")
NEOX_THEIRS = {
    **{key: THEIRS[key] for key in THEIRS if key not in ("num_key_value_heads", "rms_norm_eps")},
    **{"layer_norm_eps": 3e-4, "hidden_dropout": 0.2},
}
NEOX = LLAMA.model_copy(
    update={
        **{"kv_channels": None, "num_query_groups": None, "normalization": "LayerNorm"},
        **{"add_bias_linear": True, "activation": "gelu_exact", "hidden_dropout": 0.2},
    }
)


def of(base: ModelConfig, *updates: Mapping[str, Any]) -> ModelConfig:
    """The model with other settings."""
    return base.model_copy(update={name: value for update in updates for name, value in update.items()})


HYBRID_THEIRS = {
    **{key: value for key, value in NEOX_THEIRS.items() if key not in ("layer_norm_eps", "rope_parameters")},
    **{"layer_norm_epsilon": 3e-4, "num_key_value_heads": 2, "head_dim": 10, "ssm_state_size": 7},
    **{"mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "time_step_min": 0.4},
}
HYBRID = of(
    LLAMA,
    {"position_embedding_type": "none", "rotary_base": 10000.0, "activation": "squared_relu"},
    {"mamba_state_dim": 7, "mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_num_groups": 2},
    {"mamba_min_step": 0.4, "is_hybrid_model": True},
)
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

COHERE_THEIRS = {**{key: THEIRS[key] for key in THEIRS if key != "rms_norm_eps"}, "layer_norm_eps": 3e-4}
COHERE = of(
    BARE,
    {"normalization": "LayerNorm", "norm_bias": False, "use_parallel_residual": True},
    {"share_parallel_norm": True, "rotary_interleaved": True},
)

SAMPLES: Mapping[str, Sample] = {
    "qwen3": Sample("Qwen3", {**THEIRS, "head_dim": 10}, of(LLAMA, NORMED)),
    "qwen3-windows": Sample(
        "Qwen3",
        {
            **THEIRS,
            **{"head_dim": 10, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "layer_types": ["full_attention", "sliding_attention"],
        },
        of(LLAMA, NORMED, {"window_size": (4, 0), "window_attn_skip_freq": (0, 1)}),
    ),
    "qwen3-moe": Sample(
        "Qwen3Moe",
        {
            **THEIRS,
            **{"head_dim": 10, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14},
            **{"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        },
        of(LLAMA, NORMED, EXPERTS, {"moe_ffn_hidden_size": 14, "num_layers": 3, "moe_layer_freq": (1, 0, 1)}),
    ),
    "olmo2": Sample("Olmo2", THEIRS, of(BARE, ALL_NORMED, {"norm_position": "output"})),
    "olmoe": Sample(
        "Olmoe",
        {**THEIRS, "num_experts": 4, "num_experts_per_tok": 2},
        of(BARE, ALL_NORMED, EXPERTS, {"moe_router_pre_softmax": True}),
    ),
    "gemma2": Sample(
        "Gemma2",
        {
            **GEMMA_THEIRS,
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
            "layer_types": LISTED,
        },
        of(
            GEMMA,
            {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "window_attn_skip_freq": (1, 0)},
            {"untie_embeddings_and_output_weights": False},
        ),
    ),
    "gemma3": Sample(
        "Gemma3",
        {
            **GEMMA_THEIRS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "layer_types": LISTED,
        },
        of(
            GEMMA,
            NORMED,
            {"rotary_base": 900.0, "rotary_seq_len_interpolation_factor": 3.0, "window_rotary_base": 50.0},
            {"window_attn_skip_freq": (1, 0)},
        ),
        config="Gemma3TextConfig",
    ),
    "phi3": Sample(
        "Phi3",
        {**THEIRS, "sliding_window": 4, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
        of(BARE, {"window_size": (3, 0), "hidden_dropout": 0.2}),
    ),
    "gpt-oss": Sample(
        "GptOss",
        {
            **THEIRS,
            **{"head_dim": 10, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
            **{"rope_parameters": YARN, "layer_types": LISTED, "swiglu_limit": 0.6},
        },
        of(
            LLAMA,
            EXPERTS,
            OUR_YARN,
            {"add_bias_linear": True, "activation": "quick_geglu", "glu_linear_offset": 1.0},
            {"activation_func_clamp_value": 0.6, "softmax_type": "learnable", "moe_router_bias": True},
            {"window_size": (3, 0), "window_attn_skip_freq": (1, 0)},
        ),
    ),
    "granite": Sample(
        "Granite",
        {
            **THEIRS,
            **{"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
            "logits_scaling": 3.0,
        },
        of(
            BARE,
            {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "softmax_scale": 0.3},
            {"logits_multiplier": 1 / 3.0},
        ),
    ),
    "deepseek-v3": Sample(
        "DeepseekV3",
        {
            **DEEPSEEK_THEIRS,
            **{"q_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4},
            **{"topk_group": 2, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.3}},
            "routed_scaling_factor": 1.7,
        },
        of(
            DEEPSEEK,
            {**OUR_YARN, "position_embedding_type": "rope", "mscale": 0.8, "mscale_all_dim": 0.3},
            {"q_lora_rank": 16, "num_experts": (8,), "moe_router_topk": 4, "moe_router_num_groups": 4},
            {"moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 1.7},
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        ),
    ),
    "deepseek-v2-lite": Sample(
        "DeepseekV2",
        {**DEEPSEEK_THEIRS, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2},
        of(DEEPSEEK, EXPERTS, {"moe_router_pre_softmax": True, "rope_type": "rope"}),
    ),
    "deepseek-v2": Sample(
        "DeepseekV2",
        {
            **DEEPSEEK_THEIRS,
            **{"q_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4},
            **{"topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        of(
            DEEPSEEK,
            {**OUR_YARN, "position_embedding_type": "rope", "mscale": 0.7, "mscale_all_dim": 0.7},
            {"q_lora_rank": 16, "num_experts": (8,), "moe_router_topk": 2, "moe_router_num_groups": 4},
            {"moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 1.7},
            {"moe_router_pre_softmax": True},
        ),
    ),
    "gpt-neox": Sample(
        "GPTNeoX",
        {
            **{key: value for key, value in NEOX_THEIRS.items() if key != "rope_parameters"},
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.67, "rope_type": "default"},
        },
        of(NEOX, {"use_parallel_residual": True, "rotary_percent": 0.67}),
    ),
    "gpt-neox-one-by-one": Sample(
        "GPTNeoX",
        {
            **NEOX_THEIRS,
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            "rope_parameters": {
                **{"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
                "partial_rotary_factor": 0.34,
            },
        },
        of(
            NEOX,
            {"rotary_percent": 0.34, "rotary_seq_len_interpolation_factor": 3.0, "activation": "gelu"},
            {"untie_embeddings_and_output_weights": False},
        ),
    ),
    "falcon": Sample(
        "Falcon",
        {
            **{name: value for name, value in NEOX_THEIRS.items() if name not in _NEOX_NAMES},
            **{"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 58},
            **{"layer_norm_epsilon": 3e-4, "rope_parameters": THEIRS["rope_parameters"]},
        },
        of(NEOX, {"use_parallel_residual": True, "num_query_groups": 2, "add_bias_linear": False}),
    ),
    "opt": Sample(
        "OPT",
        {
            **{"vocab_size": VOCAB, "hidden_size": 42, "num_hidden_layers": 2, "num_attention_heads": 6},
            **{"ffn_dim": 74, "max_position_embeddings": 31, "dropout": 0.2, "attention_dropout": 0.3},
            **{"init_std": 0.08, "tie_word_embeddings": False},
        },
        of(
            GPT2,
            {"activation": "relu", "norm_epsilon": 1e-5, "untie_embeddings_and_output_weights": True},
        ),
    ),
    "opt-without-biases": Sample(
        "OPT",
        {
            **{"vocab_size": VOCAB, "hidden_size": 42, "num_hidden_layers": 2, "num_attention_heads": 6},
            **{"ffn_dim": 74, "max_position_embeddings": 31, "enable_bias": False},
            "activation_function": "gelu",
        },
        of(GPT2, {"activation": "gelu_exact", "norm_epsilon": 1e-5, "add_bias_linear": False}),
    ),
    "mamba2": Sample(
        "Mamba2",
        {
            **{"vocab_size": VOCAB, "hidden_size": 36, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 9},
            **{"state_size": 7, "n_groups": 2, "layer_norm_epsilon": 3e-4},
        },
        of(
            HYBRID,
            {"mamba_num_heads": 8, "mamba_head_dim": 9, "mamba_min_step": 0.0, "num_query_groups": None},
            {"hybrid_layer_pattern": "MM", "kv_channels": None, "num_attention_heads": 1},
        ),
    ),
    "mamba2-shortest-step": Sample(
        "Mamba2",
        {
            **{"vocab_size": VOCAB, "hidden_size": 36, "num_hidden_layers": 2, "num_heads": 12},
            **{"head_dim": 3, "expand": 1, "state_size": 7, "n_groups": 4, "layer_norm_epsilon": 3e-4},
            **{"tie_word_embeddings": True, "time_step_limit": [0.4, float("inf")]},
        },
        of(
            HYBRID,
            {"mamba_num_heads": 12, "mamba_head_dim": 3, "mamba_num_groups": 4, "num_layers": 2},
            {"untie_embeddings_and_output_weights": False},
        ),
    ),
    "nemotron-h": Sample(
        "NemotronH",
        {**HYBRID_THEIRS, "layers_block_type": [KINDS[letter] for letter in "M-*M"]},
        of(HYBRID, {"num_layers": 4, "hybrid_layer_pattern": "M-*M"}),
    ),
    "nemotron-h-experts": Sample(
        "NemotronH",
        {
            **HYBRID_THEIRS,
            **{"layers_block_type": [KINDS[letter] for letter in "MEM*E-"], "time_step_min": 1e-30},
            **{"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
            **{"routed_scaling_factor": 1.7, "moe_intermediate_size": 14},
            "moe_shared_expert_intermediate_size": 22,
        },
        of(
            HYBRID,
            {"num_layers": 6, "hybrid_layer_pattern": "MEM*E-", "num_experts": (8,), "moe_router_topk": 4},
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 1.7},
            {"moe_ffn_hidden_size": 14, "moe_shared_expert_intermediate_size": 22, "mamba_min_step": 0.0},
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        ),
    ),
    "bamba": Sample(
        "Bamba",
        {
            **{**THEIRS, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3},
            **{"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2},
            **{"mamba_d_state": 7},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        },
        of(
            HYBRID,
            {"hidden_size": 48, "num_attention_heads": 4, "num_layers": 6, "activation": "swiglu"},
            {"kv_channels": None, "rotary_percent": 0.5, "rotary_seq_len_interpolation_factor": 3.0},
            {"position_embedding_type": "rope", "rotary_base": 500.0, "hybrid_layer_pattern": "M-*-M-"},
            {"mamba_num_heads": 8, "mamba_head_dim": 12, "mamba_min_step": 0.0},
        ),
    ),
    "cohere": Sample(
        "Cohere",
        {**COHERE_THEIRS, "logit_scale": 0.6, "tie_word_embeddings": True},
        of(COHERE, {"logits_multiplier": 0.6, "untie_embeddings_and_output_weights": False}),
    ),
    "cohere2": Sample(
        "Cohere2",
        {
            **COHERE_THEIRS,
            **{"logit_scale": 0.7, "sliding_window": 4, "num_hidden_layers": 4},
            "layer_types": [*LISTED, "sliding_attention", "sliding_attention"],
        },
        of(
            COHERE,
            {"logits_multiplier": 0.7, "window_size": (3, 0), "window_attn_skip_freq": (1, 0, 1, 1)},
            {"no_rope_freq": (0, 1, 0, 0), "num_layers": 4},
        ),
    ),
    "smollm3": Sample(
        "SmolLM3",
        {**THEIRS, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]},
        of(BARE, {"num_layers": 4, "no_rope_freq": (0, 1, 0, 0)}),
    ),
    "apertus": Sample("Apertus", {**THEIRS, "head_dim": 10}, of(LLAMA, NORMED, {"activation": "xielu"})),
    "apertus-scaled": Sample(
        "Apertus",
        {
            **{**THEIRS, "tie_word_embeddings": True, "max_position_embeddings": 64},
            "intermediate_size": 54,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 900.0, "factor": 6.0, "low_freq_factor": 0.5},
                **{"high_freq_factor": 2.0, "original_max_position_embeddings": 8},
            },
        },
        of(
            BARE,
            NORMED,
            {
                "activation": "xielu",
                "ffn_hidden_size": 54,
                "rotary_base": 900.0,
                "use_rope_scaling": True,
                "rope_scaling_factor": 6.0,
            },
            {"rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0, "seq_length": 64},
            {"rope_original_max_position_embeddings": 8, "untie_embeddings_and_output_weights": False},
        ),
    ),
    "smollm3-every-second": Sample(
        "SmolLM3",
        {
            **THEIRS,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
        of(BARE, {"num_layers": 4, "no_rope_freq": (2,), "add_bias_linear": True}),
    ),
}
