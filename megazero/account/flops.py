"""Floating-point operations of a transformer's blocks, per token, forward only.

A matrix product of [m, k] and [k, n] takes 2 m k n FLOPs: k multiplications and k additions per output. Only
matrix products are counted, as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, with its later
refinements), and not norms, activations or embedding lookups.
"""

from __future__ import annotations

from megazero.layers.state_space.flops import mamba_flops
from megazero.spec.experts import MoeSpec
from megazero.spec.model import LayerSpec
from megazero.spec.parts import AttentionSpec, LatentAttentionSpec, MlpSpec, SightSpec


def layer_flops(layer: LayerSpec, length: int, *, queried: float = 1.0) -> float:
    """FLOPs of one layer per token of sequences of `length`.

    Only a share `queried` of the tokens passes through attention's queries, output and the MLP; all have keys
    and values.
    """
    if layer.mixer is not None:
        return mamba_flops(layer.mixer)
    attention = 0.0
    if layer.attention is not None:
        attention = attention_flops(layer.attention, length, queried=queried)
    return attention + (0.0 if layer.mlp is None else queried * mlp_flops(layer.mlp))


def attention_flops(spec: AttentionSpec | LatentAttentionSpec, length: int, *, queried: float = 1.0) -> float:
    """FLOPs of one layer's attention per token; `queried` as in `layer_flops`.

    With hidden size h, q = heads x head width, k = key/value heads x head width and t keys that a token
    attends to on average: 2 h (q + 2 k) + 2 q h for the projections, and 2 t q each for the scores and for
    their product with the values.

    Latent attention (DeepSeek-V2) with n heads, a compressed vector of r channels, a rotary key of c channels
    and values of v channels in all heads: 2 h (r + c) + 2 r (q - n c + v) for keys and values; v replaces q
        in
    the output projection and in the product with the values.
    """
    hidden = spec.stream.width
    query, value = (spec.heads * width for width in (spec.head_dim, spec.value_dim))
    projected: float
    if isinstance(spec, LatentAttentionSpec):
        rank, rotary, query_rank = spec.rank, spec.rotary_dim, spec.query_rank
        projected = 2 * hidden * (rank + rotary)
        projected += 2 * rank * (query - spec.heads * rotary + value)
        projected += 2 * query * (query_rank or hidden) + 2 * hidden * (query_rank or 0)
    else:
        projected = 2 * hidden * (query * (1 + spec.gated) + 2 * spec.groups * spec.head_dim)
    attended = attended_keys(spec.sight, length)
    return projected + queried * (2 * value * hidden + 2 * attended * (query + value))


def attended_keys(sight: SightSpec, length: int) -> float:
    """The mean number of keys that a token of a sequence of length s attends to.

    It has s / 2 keys on each side on average, its own counted on the left. A causal mask hides the right
    side. A window of w keys on a side hides (s - w)^2 / 2s of them on average; sinks on the left stay
    visible.
    """
    s, (left, right) = length, sight.window or (-1, -1)

    def triangle(width: int) -> float:
        return max(0, width) ** 2 / (2 * s)

    hidden_before = 0.0 if left < 0 else triangle(s - left - 1 - sight.sinks)
    if sight.causal:
        return s / 2 - hidden_before
    hidden_after = 0.0 if right < 0 else triangle(s - right)
    return s - hidden_before - hidden_after


def mlp_flops(spec: MlpSpec | MoeSpec) -> float:
    """FLOPs of an MLP per token: two matrices of size h x inner width, or three with a gate.

    With E experts, of which a token uses k: 2 h E for the router, and k MLPs of the experts' width, beside a
    shared or a residual MLP. Dropped tokens count, because their share is not known in advance.
    """
    if isinstance(spec, MlpSpec):
        return _matrices(spec) * 2 * spec.stream.width * spec.width
    hidden = spec.stream.width
    widths, gates = spec.router.topk * spec.expert.width, spec.experts
    if spec.shared is not None:
        widths, gates = widths + spec.shared.width, gates + spec.shared_gate
    if spec.dense is not None:
        widths, gates = widths + spec.dense.width, gates + 2
    return _matrices(spec.expert) * 2 * hidden * widths + 2 * hidden * gates


def _matrices(spec: MlpSpec) -> int:
    return 3 if spec.activation.gated else 2


def logits_flops(hidden: int, padded_vocab: int) -> float:
    """FLOPs of the projection to a vocabulary of V rows: 2 h V."""
    return 2 * hidden * padded_vocab


def dense_flops(hidden: int) -> float:
    """FLOPs of one square layer: 2 h h."""
    return 2 * hidden**2
