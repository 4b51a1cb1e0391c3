"""Self-attention over keys and values that are computed from one small vector per token.

(Multi-head latent attention, DeepSeek-V2, Liu et al. 2024, arXiv:2405.04434.) As in Megatron-LM's and
DeepSeek's weights, rotated channels are pairs of neighbours.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.attention_cores import core_of
from megazero.layers.collectives import gather_for_parts, share_for_parts
from megazero.layers.computed_again import computed_again
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megazero.layers.norm import Norm
from megazero.layers.patterns import pattern_of
from megazero.layers.placement import Placement
from megazero.layers.rotary import halves, rotary_tables_at
from megazero.ops.attention import Softcap
from megazero.ops.rotary import apply_rotary
from megazero.spec.parts import LatentAttentionSpec, NormSpec


class LatentAttention(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added), with the rows that `SelfAttention` has.

    A token has a small vector [r], from which every head computes its key and value, and one rotated key of c
    channels that all heads share. Both are the same on all tensor-parallel ranks; the heads' keys and values
    are sliced. Queries come from the hidden state, or from a small vector of their own. Between generation
    steps only the small vector and the rotated key are kept: r + c numbers per token.

    Args:
        recompute: whether to drop the attention core's activations and compute them again in backward.
        made_again: whether to drop keys and values too, and compute them again in backward.

    Attributes:
        by_heads: whether rows that continue earlier ones compute what all rows at once do: the heads' keys
            and values are kept, with values as wide as keys, for which there is a kernel on every device.
    """

    by_heads = False

    def __init__(
        self,
        layer: int,
        spec: LatentAttentionSpec,
        placement: Placement,
        *,
        recompute: bool = False,
        made_again: bool = False,
    ):
        super().__init__()
        pattern = pattern_of(spec.sight, layer, placement.tp)
        self.attends = Attends(layer, spec.sight.causal, spec.dropout, pattern, spec.scale)
        self.softcap = None if spec.softcap is None else Softcap(spec.softcap)
        self.rotary = rotary_tables_at(spec.rotary)
        self.core = core_of(placement, layer)
        self.spec, self.placement = spec, placement
        self.recompute, self.made_again = recompute, made_again
        self.name = f"layers.{layer}.attention"
        heads, turned, stream = spec.heads, spec.rotary_dim, spec.stream
        narrow, width = spec.query_rank, stream.width
        self.query_down: nn.Module | None = None
        self.query_norm: nn.Module | None = None
        if narrow is not None:
            self.query_down = self._down("query_down", narrow)
            self.query_norm = self._norm("query_norm", spec.query_norm)
            width = narrow
        self.query = self._up("query", width, (heads, spec.head_dim))
        self.latent_down = self._down("latent_down", spec.rank + turned)
        self.latent_norm = self._norm("latent_norm", spec.latent_norm)
        self.latent_up = self._up("latent_up", spec.rank, (heads, spec.plain_dim + spec.value_dim))
        self.out = RowParallelLinear(
            f"{self.name}.out",
            heads * spec.value_dim,
            stream.width,
            placement,
            bias=stream.bias,
            std=stream.out_std,
        )

    def _down(self, name: str, width: int) -> ReplicatedLinear:
        named, stream = f"{self.name}.{name}", self.spec.stream
        return ReplicatedLinear(named, stream.width, width, self.placement, stream.std, between=True)

    def _up(self, name: str, width: int, shape: tuple[int, int]) -> ColumnParallelLinear:
        named, std = f"{self.name}.{name}", self.spec.stream.std
        return ColumnParallelLinear(named, width, shape, self.placement, bias=False, std=std)

    def _norm(self, name: str, of: NormSpec | None) -> nn.Module | None:
        return None if of is None else Norm(f"{self.name}.{name}", of, self.placement)

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        spec, deferred = self.spec, inputs.deferred
        assert inputs.rows.rotary is not None, "a rule asks for rotary positions"
        tables = inputs.rows.rotary[self.rotary]
        small = x if self.query_down is None else _normed(self.query_norm, self.query_down(x, deferred))
        q = self.query(small, deferred).unflatten(-1, self.query.local_shape)  # [s, b, n/tp, d]
        own, turned = q.split((spec.plain_dim, spec.rotary_dim), -1)
        q = torch.cat((own, apply_rotary(halves(turned, turned.shape[-1]), *tables)), -1)
        down = self.latent_down(x, deferred)
        latent, key = down.split((spec.rank, spec.rotary_dim), -1)
        latent = _normed(self.latent_norm, latent)
        shared = self._shared(key)
        key = apply_rotary(halves(shared, shared.shape[-1]).unsqueeze(2), *tables)  # [s, b, 1, c]
        if inputs.core is not None:
            return self._result(self._generated(q, latent.unsqueeze(2), key, inputs, inputs.core), inputs)
        if self.made_again:
            context = computed_again(True, self._attend_made, q, latent.unsqueeze(2), key, inputs)
            return self._result(context, inputs)
        k, v = self._keys_and_values(latent.unsqueeze(2), key, inputs)
        context = computed_again(self.recompute, self._attend, q, k, v, inputs)
        return self._result(context, inputs)

    def _generated(
        self, q: Tensor, latent: Tensor, key: Tensor, inputs: LayerInputs, core: AttentionCore
    ) -> Tensor:
        """The context [s, b, n e] of rows that continue earlier ones.

        For few rows the small vectors serve as keys and values themselves: the projections that would make
        heads of them are applied to queries and to the context instead. This takes n (2 r + c) products for
        each pair instead of n (d + c + e), and n r (d + e) for each new row instead of each kept one.
        """
        rank, own, value = self.spec.rank, self.spec.plain_dim, self.spec.value_dim
        if self.by_heads:
            return self._by_heads(core, q, *self._keys_and_values(latent, key, inputs), inputs)
        if len(q) * (2 * rank - own - value) >= rank * (own + value):
            attends = replace(self.attends, unpacked=self._keys_and_values)
            return core(q, latent, key, inputs, attends, self.softcap)
        to_keys, to_values = self.latent_up.weight.split((own, value), 1)  # [n/tp, d or e, r]
        plain, turned = q.split((own, q.shape[-1] - own), -1)
        q = torch.cat((torch.einsum("sbnd,ndr->sbnr", plain, to_keys), turned), -1)
        attends = replace(self.attends, unpacked=lambda latent, key: (torch.cat((latent, key), -1), latent))
        context = core(q, latent, key, inputs, attends, self.softcap).unflatten(-1, (-1, rank))
        return torch.einsum("sbnr,ner->sbne", context, to_values).flatten(2)

    def _shared(self, key: Tensor) -> Tensor:
        """The shared rotated key [s, b, c] of all rows, for a computation by heads."""
        tp = self.placement.tp
        if self.placement.sequence_parallel:
            return gather_for_parts(key.contiguous(), tp)
        return share_for_parts(key, tp)

    def _keys_and_values(
        self, latent: Tensor, key: Tensor, inputs: LayerInputs | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys [t, b, n/tp, d] and values [t, b, n/tp, e] of small vectors [t, b, 1, r] and [t, b, 1, c]."""
        deferred = None if inputs is None else inputs.deferred
        made = self.latent_up(latent.squeeze(2), deferred).unflatten(-1, self.latent_up.local_shape)
        own, value = made.split((self.spec.plain_dim, self.spec.value_dim), -1)
        return torch.cat((own, key.expand(-1, -1, own.shape[2], -1)), -1), value

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs) -> Tensor:
        if self.by_heads:
            return self._by_heads(self.core, q, k, v, inputs)
        return self.core(q, k, v, inputs, self.attends, self.softcap)

    def _by_heads(self, core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs) -> Tensor:
        wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        context = core(q, k, wide, inputs, self.attends, self.softcap)
        return context.view(*q.shape)[..., : v.shape[-1]].flatten(2)

    def _attend_made(self, q: Tensor, latent: Tensor, key: Tensor, inputs: LayerInputs) -> Tensor:
        k, v = self._keys_and_values(latent, key, inputs)
        return self._attend(q, k, v, inputs)

    def _result(self, context: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self.out(context, inputs.deferred)
        return result


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    result: Tensor = norm(x)
    return result.to(x.dtype)
