"""megazero's global weights under Hugging Face's names and layouts, for GPT-2 and Llama.

The mappings are linear rearrangements, so they carry gradients as well as weights.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megazero.config.tree import ModelConfig
from megazero.mpu import Group, spec_of

Weights = dict[str, Tensor]


def global_weights(model: nn.Module, tp: Group, of: Callable = lambda p: p.detach()) -> Weights:
    """``of(parameter)`` of every parameter, whole and without padding, by global name.

    Every rank of `tp` calls this and gets all.
    """
    return {spec_of(p).name: spec_of(p).unshard(of(p), tp) for p in model.parameters()}


def global_gradients(model: nn.Module, tp: Group) -> Weights:
    """The gradients, likewise."""
    return global_weights(model, tp, lambda p: p.grad)


def to_gpt2(weights: Weights, num_layers: int) -> Weights:
    """For GPT2LMHeadModel. Its linear layers (Conv1D) hold [in, out], the transpose of ours."""
    out = {
        "transformer.wte.weight": weights["embedding.word.weight"],
        "transformer.wpe.weight": weights["embedding.position.weight"],
        "lm_head.weight": weights.get("head.weight", weights["embedding.word.weight"]),
    }
    _rename(weights, out, "final_norm", "transformer.ln_f")
    for i in range(num_layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        _rename(weights, out, f"{ours}.input_norm", f"{theirs}.ln_1")
        _rename(weights, out, f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for linear, name in (
            ("attention.out", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            out[f"{theirs}.{name}.weight"] = weights[f"{ours}.{linear}.weight"].t().contiguous()
            out[f"{theirs}.{name}.bias"] = weights[f"{ours}.{linear}.bias"]
        # [heads, (q, k, v), d, h] -> [h, all q then all k then all v]
        qkv = weights[f"{ours}.attention.qkv.weight"].transpose(0, 1)
        out[f"{theirs}.attn.c_attn.weight"] = qkv.reshape(-1, qkv.shape[-1]).t().contiguous()
        out[f"{theirs}.attn.c_attn.bias"] = weights[f"{ours}.attention.qkv.bias"].transpose(0, 1).flatten()
    return out


def to_llama(weights: Weights, num_layers: int) -> Weights:
    """For LlamaForCausalLM: linear layers [out, in] as ours, heads in order of their groups."""
    out = {
        "model.embed_tokens.weight": weights["embedding.word.weight"],
        "lm_head.weight": weights.get("head.weight", weights["embedding.word.weight"]),
        "model.norm.weight": weights["final_norm.weight"],
    }
    for i in range(num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        qkv = weights[f"{ours}.attention.qkv.weight"]  # [groups, queries per group + 2, d, h]
        for name, part in (("q", qkv[:, :-2]), ("k", qkv[:, -2]), ("v", qkv[:, -1])):
            out[f"{theirs}.self_attn.{name}_proj.weight"] = part.reshape(-1, qkv.shape[-1])
        out[f"{theirs}.self_attn.o_proj.weight"] = weights[f"{ours}.attention.out.weight"]
        gate, up = weights[f"{ours}.mlp.up.weight"]
        out[f"{theirs}.mlp.gate_proj.weight"], out[f"{theirs}.mlp.up_proj.weight"] = gate, up
        out[f"{theirs}.mlp.down_proj.weight"] = weights[f"{ours}.mlp.down.weight"]
        out[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}.input_norm.weight"]
        out[f"{theirs}.post_attention_layernorm.weight"] = weights[f"{ours}.mlp_norm.weight"]
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


def llama_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """LlamaForCausalLM of this shape."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_theta": config.rotary_base}
    if int(transformers.__version__.split(".")[0]) >= 5:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base}}
    theirs = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=config.positions,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_size,
        hidden_act="silu",
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=None,
        **rope,
    )
    return LlamaForCausalLM(theirs).eval()


def _rename(weights: Weights, out: Weights, ours: str, theirs: str) -> None:
    for suffix in ("weight", "bias"):
        out[f"{theirs}.{suffix}"] = weights[f"{ours}.{suffix}"]
