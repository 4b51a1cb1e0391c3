"""Self-attention over keys and values that are made of one small vector of each token.

(Multi-head latent attention, DeepSeek-V2, Liu et al. 2024, arXiv:2405.04434.) Weights have the order of
Megatron-LM's and DeepSeek's: the channels of a rotated part are pairs of neighbours.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.layers.collectives import gather_for_parts, share_for_parts
from megazero.layers.computed_again import computed_again
from megazero.layers.cores import core_of
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, residual_std
from megazero.layers.norm import Norm
from megazero.layers.patterns import pattern_of
from megazero.layers.placement import Placement
from megazero.layers.rotary import halves, rotary_tables_at
from megazero.ops.attention import Softcap
from megazero.ops.rotary import apply_rotary


def latent_scale(config: ModelConfig) -> float:
    """The factor of scores: 1 / sqrt(d), which YaRN multiplies by (0.1 mscale_all_dim ln factor + 1)^2."""
    sharper = 1.0
    if config.scales_by_yarn:
        sharper += 0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor)
    return sharper**2 / math.sqrt(config.head_dim)


class LatentAttention(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added), with the rows that `SelfAttention` has.

    A token has a small vector [r], of which every head makes its key and value, and one rotated key of c
    channels, which all heads share. Both are the same on all tensor-parallel ranks; what is made of the small
    vector is sliced over heads. Queries are made of the token's hidden state, or of a small vector too.
    Between generation steps only the small vector and the rotated key are kept: r + c numbers of a token.

    Args:
        causal: whether a position attends only to itself and earlier ones.
        recompute: whether to drop the attention core's activations and compute them again in backward.
        made_again: whether to drop keys and values too, and make them again.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        *,
        causal: bool,
        recompute: bool = False,
        made_again: bool = False,
    ):
        super().__init__()
        pattern = pattern_of(config, layer, placement.tp, causal)
        scale = latent_scale(config)
        self.attends = Attends(layer, causal, config.attention_dropout, pattern, scale)
        cap = config.attn_logit_softcapping
        self.softcap = None if cap is None else Softcap(cap)
        self.rotary = rotary_tables_at(config, layer)
        self.core = core_of(placement, layer)
        self.config, self.placement = config, placement
        self.recompute, self.made_again = recompute, made_again
        self.name = f"layers.{layer}.attention"
        heads, turned = config.num_attention_heads, config.qk_pos_emb_head_dim
        narrow, width = config.q_lora_rank, config.hidden_size
        self.query_down: nn.Module | None = None
        self.query_norm: nn.Module | None = None
        if narrow is not None:
            self.query_down, self.query_norm = self._down("query_down", narrow), self._norm("query", narrow)
            width = narrow
        self.query = self._up("query", width, (heads, config.qk_head_dim + turned))
        rank = config.kv_lora_rank
        self.latent_down, self.latent_norm = (
            self._down("latent_down", rank + turned),
            self._norm("latent", rank),
        )
        self.latent_up = self._up("latent_up", rank, (heads, config.qk_head_dim + config.v_head_dim))
        self.out = RowParallelLinear(
            f"{self.name}.out",
            heads * config.v_head_dim,
            config.hidden_size,
            placement,
            bias=config.add_bias_linear,
            std=residual_std(config),
        )

    def _down(self, name: str, width: int) -> ReplicatedLinear:
        config = self.config
        named = f"{self.name}.{name}"
        std = config.init_method_std
        return ReplicatedLinear(named, config.hidden_size, width, self.placement, std, between=True)

    def _up(self, name: str, width: int, shape: tuple[int, int]) -> ColumnParallelLinear:
        named, std = f"{self.name}.{name}", self.config.init_method_std
        return ColumnParallelLinear(named, width, shape, self.placement, bias=False, std=std)

    def _norm(self, name: str, width: int) -> nn.Module | None:
        config = self.config
        if not config.qk_layernorm:
            return None
        named = f"{self.name}.{name}_norm"
        decayed = config.apply_wd_to_qk_layernorm and name == "query"  # as in Megatron-LM
        return Norm(named, config, self.placement, width, decayed=decayed)

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        config, deferred = self.config, inputs.deferred
        assert inputs.rows.rotary is not None, "a rule asks for rotary positions"
        tables = inputs.rows.rotary[self.rotary]
        small = x if self.query_down is None else _normed(self.query_norm, self.query_down(x, deferred))
        q = self.query(small, deferred).unflatten(-1, self.query.local_shape)  # [s, b, n/tp, d]
        own, turned = q.split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        q = torch.cat((own, apply_rotary(halves(turned, turned.shape[-1]), *tables)), -1)
        down = self.latent_down(x, deferred)
        latent, key = down.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), -1)
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
        """The context [s, b, n e] of rows that go on where earlier ones ended.

        For few rows the small vectors are keys and values themselves, and the products that would make heads
        of all of them are applied to queries and to the context: n (2 r + c) products for each pair instead
        of n (d + c + e), and n r (d + e) for each row instead of for each that is kept.
        """
        rank, own, value = self.config.kv_lora_rank, self.config.qk_head_dim, self.config.v_head_dim
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
        """The key [s, b, c] of all rows, for the heads of each rank."""
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
        own, value = made.split((self.config.qk_head_dim, self.config.v_head_dim), -1)
        return torch.cat((own, key.expand(-1, -1, own.shape[2], -1)), -1), value

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs) -> Tensor:
        return self.core(q, k, v, inputs, self.attends, self.softcap)

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
