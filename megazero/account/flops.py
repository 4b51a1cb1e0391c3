"""Floating-point operations of a transformer's blocks, per token, forward only.

A matrix product of [m, k] and [k, n] takes 2 m k n of them: k multiplications and k additions per output.
Only matrix products are counted, as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, with its later
refinements); norms, activations and embedding lookups count as none.
"""

from __future__ import annotations

from megazero.layers.state_space.flops import mamba_flops
from megazero.spec.experts import MoeSpec
from megazero.spec.model import LayerSpec
from megazero.spec.parts import AttentionSpec, LatentAttentionSpec, MlpSpec, SightSpec


def layer_flops(layer: LayerSpec, length: int, *, queried: float = 1.0) -> float:
    """FLOPs of one layer over sequences of `length`; a share `queried` of the rows goes on from its query."""
    if layer.mixer is not None:
        return mamba_flops(layer.mixer)
    attention = 0.0
    if layer.attention is not None:
        attention = attention_flops(layer.attention, length, queried=queried)
    return attention + (0.0 if layer.mlp is None else queried * mlp_flops(layer.mlp))


def attention_flops(spec: AttentionSpec | LatentAttentionSpec, length: int, *, queried: float = 1.0) -> float:
    """FLOPs of one layer's attention.

    With hidden size h, q = heads x head width, k = key/value heads x head width and t keys that a row attends
    to on average: 2 h (q + 2 k) + 2 q h for the projections, and 2 t q each for the scores and for their
    product with the values. Only the share `queried` of the rows goes on from its query.

    Latent attention, with r channels of a small vector, c of the rotated key, and values of v channels in
    all, makes 2 h (r + c) + 2 r (q - n c + v) of keys and values, and v takes the place of q where it counts.
    """
    hidden = spec.stream.width
    query, value = (spec.heads * width for width in (spec.head_dim, spec.value_dim))
    projected: float
    if isinstance(spec, LatentAttentionSpec):
        rank, turned, narrow = spec.rank, spec.rotary_dim, spec.query_rank
        projected = 2 * hidden * (rank + turned)
        projected += 2 * rank * (query - spec.heads * turned + value)
        projected += 2 * query * (narrow or hidden) + 2 * hidden * (narrow or 0)
    else:
        projected = 2 * hidden * (query * (1 + spec.gated) + 2 * spec.groups * spec.head_dim)
    attended = attended_keys(spec.sight, length)
    return projected + queried * (2 * value * hidden + 2 * attended * (query + value))


def attended_keys(sight: SightSpec, length: int) -> float:
    """The keys that a row attends to on average, of a sequence of length s.

    There are s / 2 on each side, the row's own among those on the left. A causal mask hides the right ones. A
    window of w keys on a side hides those beyond, (s - w)^2 / 2s on average; on the left, sinks stay.
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
    """FLOPs of an MLP of inner width f: two matrices of size h f, or three with a gate.

    With E experts of which a token is sent to k: 2 h E for the router, and k MLPs of the experts' width,
    beside a shared or a residual one. Tokens that are dropped count, as their share is not known before.
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
