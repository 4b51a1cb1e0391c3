"""Floating-point operations of a transformer's blocks, per token, forward only.

A matrix product of [m, k] and [k, n] takes 2 m k n of them: k multiplications and k additions per output.
Only matrix products are counted, as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, with its later
refinements); norms, activations and embedding lookups count as none.
"""

from __future__ import annotations

from megazero.config.derive import experts_of
from megazero.config.tree.model import ModelConfig


def attention_flops(model: ModelConfig, *, causal: bool, queried: float = 1.0) -> float:
    """FLOPs of one layer's attention.

    With hidden size h, sequence length s, q = heads x head width and k = key/value heads x head width:
    2 h (q + 2 k) + 2 q h for the projections, and 2 s q each for the scores and for their product with the
    values. A causal mask halves the last two. Only the share `queried` of the rows goes on from its query.
    """
    query = model.num_attention_heads * model.head_dim
    key = model.kv_heads * model.head_dim
    projected = 2 * model.hidden_size * (query + 2 * key)
    attended = model.seq_length / 2 if causal else model.seq_length
    return projected + queried * (2 * query * model.hidden_size + 2 * (2 * attended * query))


def mlp_flops(model: ModelConfig) -> float:
    """FLOPs of one layer's MLP of inner width f: two matrices of size h f, or three with SwiGLU."""
    matrices = 3 if model.activation == "swiglu" else 2
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
