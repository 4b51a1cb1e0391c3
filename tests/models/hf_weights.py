"""megazero's global weights under Hugging Face's names and layouts, and transformers' GPT-2 and Llama.

The rules of conversion are rearrangements, so they carry gradients as well as weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megazero.checkpoint.naming import Table
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.config_json import architecture_of
from megazero.mpu.group import Group
from megazero.mpu.param_spec import spec_of
from megazero.spec.resolve import model_spec

Weights = dict[str, Tensor]


def global_weights(
    model: nn.Module, groups: Mapping[str, Group], of: Callable = lambda p: p.detach()
) -> Weights:
    """``of(parameter)`` of every parameter, whole and without padding, by global name.

    Every rank calls this with its context's groups and gets all.
    """
    return {spec_of(p).name: spec_of(p).unshard(of(p), groups) for p in model.parameters()}


def global_gradients(model: nn.Module, groups: Mapping[str, Group]) -> Weights:
    """The gradients, likewise."""
    return global_weights(model, groups, lambda p: p.grad)


def to_theirs(weights: Weights, config: ModelConfig, vocab_size: int) -> Weights:
    """As the state of transformers' model, by the tables that convert checkpoints; a tied head too."""
    architecture = architecture_of(config)
    out = {}
    for link in Table.of(architecture.rules, model_spec(config), vocab_size).links:
        out[link.theirs] = torch.empty(link.their_shape)
        link.as_ours(out[link.theirs]).copy_(weights[link.key.name][link.box.slices])
    for copy, original in architecture.copies:
        out.setdefault(copy, out[original])
    return out


def gpt2_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """GPT2LMHeadModel of this shape, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {"gelu": "gelu_new", "gelu_exact": "gelu"}
    theirs = GPT2Config(
        vocab_size=vocab_size,
        n_positions=config.positions,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_attention_heads,
        n_inner=config.ffn_size,
        activation_function=names[config.activation],
        layer_norm_epsilon=config.norm_epsilon,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(theirs).eval()


def rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """transformers' words for the scaling of the rotation."""
    if config.position_embedding_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "truncate": config.yarn_correction_range_round_to_int,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }
    if config.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_position_embeddings,
        }
    factor = config.rotary_seq_len_interpolation_factor
    return None if factor is None else {"rope_type": "linear", "factor": factor}


def like_llama(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """What the configurations of Llama and its descendants have in common."""
    import transformers

    rope = {"rope_theta": config.rotary_base, "rope_scaling": rope_scaling(config)}
    if int(transformers.__version__.split(".")[0]) >= 5:
        scaling = rope["rope_scaling"] or {"rope_type": "default"}
        rope = {"rope_parameters": {**scaling, "rope_theta": config.rotary_base}}
    return {
        "vocab_size": vocab_size,
        "max_position_embeddings": config.positions,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        **rope,
    }


def llama_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """LlamaForCausalLM of this shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    biases = {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}
    return LlamaForCausalLM(LlamaConfig(**like_llama(config, vocab_size), **biases)).eval()


def windows(config: ModelConfig) -> dict[str, Any]:
    """Qwen's words for the windows of some layers; a width counts the token itself."""
    if config.window_size is None:
        return {}
    flags = config.window_attn_skip_freq or (1,) * config.num_layers
    if len(flags) == 1 < flags[0]:
        flags = tuple(int((number + 1) % flags[0] > 0) for number in range(config.num_layers))
    return {
        "use_sliding_window": True,
        "sliding_window": config.window_size[0] + 1,
        "max_window_layers": flags.index(1),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags],
    }


def bloom_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """BloomForCausalLM of this shape, without dropout."""
    from transformers import BloomConfig, BloomForCausalLM

    theirs = BloomConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_attention_heads,
        layer_norm_epsilon=config.norm_epsilon,
        apply_residual_connection_post_layernorm=config.apply_residual_connection_post_layernorm,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=None,
    )
    return BloomForCausalLM(theirs).eval()


def mistral_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """MistralForCausalLM of this shape."""
    from transformers import MistralConfig, MistralForCausalLM

    width = config.window_size[0] + 1
    return MistralForCausalLM(MistralConfig(**like_llama(config, vocab_size), sliding_window=width)).eval()


def qwen2_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Qwen2ForCausalLM of this shape."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**like_llama(config, vocab_size), **windows(config))).eval()


def expert_by_expert(model: nn.Module) -> nn.Module:
    """The model without grouped products, which version 5 would take: they ask for widths of 16 bytes."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def mixtral_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """MixtralForCausalLM of this shape."""
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = {
        **like_llama(config, vocab_size),
        "intermediate_size": config.expert_ffn_size,
        "num_local_experts": config.num_experts[0],
        "num_experts_per_tok": config.moe_router_topk,
        "sliding_window": None if config.window_size is None else config.window_size[0] + 1,
    }
    return expert_by_expert(MixtralForCausalLM(MixtralConfig(**fields)).eval())


def qwen2_moe_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Qwen2MoeForCausalLM of this shape; of one channel of shared experts if the model has none."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    fields = {
        **like_llama(config, vocab_size),
        **windows(config),
        "qkv_bias": config.qkv_bias,
        "num_experts": config.num_experts[0],
        "num_experts_per_tok": config.moe_router_topk,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "moe_intermediate_size": config.expert_ffn_size,
        "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or 1,
        "decoder_sparse_step": config.expert_interval or 1,
        "mlp_only_layers": [n for n, has in enumerate(config.moe_layer_freq or ()) if not has],
    }
    return expert_by_expert(Qwen2MoeForCausalLM(Qwen2MoeConfig(**fields)).eval())


def decoder_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """transformers' decoder of this shape, of the class that `architecture_of` names."""
    makers = {
        "GPT2LMHeadModel": gpt2_model,
        "BloomForCausalLM": bloom_model,
        "LlamaForCausalLM": llama_model,
        "Qwen2ForCausalLM": qwen2_model,
        "MistralForCausalLM": mistral_model,
        "MixtralForCausalLM": mixtral_model,
        "Qwen2MoeForCausalLM": qwen2_moe_model,
    }
    return makers[architecture_of(config).name](config, vocab_size)


def bert_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """transformers' BERT of this shape, original or Megatron's, with random weights everywhere."""
    import transformers

    original = config.apply_residual_connection_post_layernorm
    prefix = "Bert" if original else "MegatronBert"
    suffix = "ForPreTraining" if config.bert_binary_head else "ForMaskedLM"
    theirs = getattr(transformers, f"{prefix}Config")(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.ffn_size,
        hidden_act={"gelu": "gelu_new", "gelu_exact": "gelu"}[config.activation],
        max_position_embeddings=config.positions,
        layer_norm_eps=config.norm_epsilon,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
    )
    model = getattr(transformers, f"{prefix}{suffix}")(theirs).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    # Version 5 has two biases if the weight is not tied, and adds only this one.
    model.cls.predictions.bias.data.copy_(model.cls.predictions.decoder.bias.data)
    return model
