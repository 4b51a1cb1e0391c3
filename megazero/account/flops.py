"""Floating-point operations of a transformer's blocks, per token, forward only.

A matrix product of [m, k] and [k, n] takes 2 m k n of them: k multiplications and k additions per output.
Only matrix products are counted, as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, with its later
refinements); norms, activations and embedding lookups count as none.
"""

from __future__ import annotations

from megazero.config.derive import experts_of
from megazero.config.hybrid.settings import ATTENTION, MAMBA
from megazero.config.tree.model import ModelConfig
from megazero.layers.state_space.flops import mamba_flops


def layer_flops(model: ModelConfig, layer: int, *, causal: bool, queried: float = 1.0) -> float:
    """FLOPs of one layer, of which only the share `queried` of the rows goes on from its query."""
    model, parts = model.at_layer(layer), model.parts_at(layer)
    if parts == MAMBA:
        return mamba_flops(model)
    attention = attention_flops(model, layer, causal=causal, queried=queried) if ATTENTION in parts else 0.0
    return attention + (queried * layer_mlp_flops(model, layer) if parts.strip(ATTENTION) else 0.0)


def attention_flops(model: ModelConfig, layer: int, *, causal: bool, queried: float = 1.0) -> float:
    """FLOPs of one layer's attention.

    With hidden size h, q = heads x head width, k = key/value heads x head width and t keys that a row attends
    to on average: 2 h (q + 2 k) + 2 q h for the projections, and 2 t q each for the scores and for their
    product with the values. Only the share `queried` of the rows goes on from its query.

    Latent attention, with r channels of a small vector, c of the rotated key, and values of v channels in
    all, makes 2 h (r + c) + 2 r (q - n c + v) of keys and values, and v takes the place of q where it counts.
    """
    query, value = (model.num_attention_heads * width for width in (model.head_dim, model.value_dim))
    key = model.kv_heads * model.head_dim
    gated = 1 + model.attention_output_gate
    projected: float = 2 * model.hidden_size * (query * gated + 2 * key)
    if model.multi_latent_attention:
        rank, turned = model.kv_lora_rank, model.qk_pos_emb_head_dim
        projected = 2 * model.hidden_size * (rank + turned)
        projected += 2 * rank * (query - model.num_attention_heads * turned + value)
        narrow = model.q_lora_rank
        projected += 2 * query * (narrow or model.hidden_size) + 2 * model.hidden_size * (narrow or 0)
    attended = attended_keys(model, layer, causal=causal)
    return projected + queried * (2 * value * model.hidden_size + 2 * attended * (query + value))


def attended_keys(model: ModelConfig, layer: int, *, causal: bool) -> float:
    """The keys that a row of a layer attends to on average, of a sequence of length s.

    There are s / 2 on each side, the row's own among those on the left. A causal mask hides the right ones. A
    window of w keys on a side hides those beyond, (s - w)^2 / 2s on average; on the left, sinks stay.
    """
    s, sinks = model.seq_length, model.window_sink_tokens
    left, right = model.window_at(layer) or (-1, -1)

    def triangle(width: int) -> float:
        return max(0, width) ** 2 / (2 * s)

    hidden_before = 0.0 if left < 0 else triangle(s - left - 1 - sinks)
    if causal:
        return s / 2 - hidden_before
    hidden_after = 0.0 if right < 0 else triangle(s - right)
    return s - hidden_before - hidden_after


def mlp_flops(model: ModelConfig) -> float:
    """FLOPs of one layer's MLP of inner width f: two matrices of size h f, or three with a gate."""
    matrices = 3 if model.gated else 2
    return matrices * 2 * model.hidden_size * model.ffn_size


def layer_mlp_flops(model: ModelConfig, layer: int) -> float:
    """FLOPs of one layer's MLP, or of all that a token goes through in the place of it.

    With E experts of which a token is sent to k: 2 h E for the router, and k MLPs of the experts' width,
    beside a shared or a residual one. Tokens that are dropped count, as their share is not known before.
    """
    experts = experts_of(model, layer)
    if not experts:
        return mlp_flops(model)
    dense = mlp_flops(model) / model.ffn_size  # of an MLP, per inner channel
    widths = model.moe_router_topk * model.expert_ffn_size
    gates = experts
    if model.moe_shared_expert_intermediate_size is not None:
        widths += model.moe_shared_expert_intermediate_size
        gates += int(model.moe_shared_expert_gate)
    if model.mlp_type == "residual":
        widths, gates = widths + model.expert_ffn_size, gates + 2
    return dense * widths + 2 * model.hidden_size * gates


def logits_flops(model: ModelConfig, padded_vocab: int) -> float:
    """FLOPs of the projection to a vocabulary of V rows: 2 h V."""
    return 2 * model.hidden_size * padded_vocab


def dense_flops(model: ModelConfig) -> float:
    """FLOPs of one square layer: 2 h h."""
    return 2 * model.hidden_size**2
