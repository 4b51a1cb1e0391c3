"""Self-attention, with its heads sliced over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.layers.computed_again import computed_again
from megazero.layers.cores import core_of
from megazero.layers.inputs import Attends, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, residual_std
from megazero.layers.norm import Norm
from megazero.layers.patterns import OwnSlopes, pattern_of
from megazero.layers.placement import Placement
from megazero.layers.rotary import halves, rotary_tables_at
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.attention import Softcap
from megazero.ops.chunks import compute_dtype
from megazero.ops.included import Included
from megazero.ops.rotary import apply_rotary


class SelfAttention(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added); both hold s/tp rows under sequence parallelism.

    If the inputs say which rows are wanted, the result is [r, b, h] and holds only these.

    Queries, keys and values come from one weight of logical shape [groups, queries per group + 2, d, h]:
    a group's query heads, then its key, then its value, so that slicing over groups keeps each group whole.
    With an output gate there is a gate for each query head, behind the group's query heads.

    Args:
        causal: whether a position attends only to itself and earlier ones.
        recompute: whether to drop the attention core's activations and compute them again in backward
            (selective recompute, Korthikanti et al. 2022).
    """

    def __init__(
        self, layer: int, config: ModelConfig, placement: Placement, *, causal: bool, recompute: bool = False
    ):
        super().__init__()
        pattern = pattern_of(config, layer, placement.tp, causal)
        self.attends = Attends(layer, causal, config.attention_dropout, pattern, config.softmax_scale)
        self.core = core_of(placement, layer)
        self.slopes = OwnSlopes.of(config, placement)
        cap = config.attn_logit_softcapping
        self.softcap = None if cap is None else Softcap(cap)
        self.softmax_type = config.softmax_type
        self.softmax_offset = self._offset_of(layer, config, placement)
        self.rotary = rotary_tables_at(config, layer)
        self.interleaved = config.rotary_dim if config.rotary_interleaved else None
        self.recompute = recompute
        queries = config.num_attention_heads // config.kv_heads
        self.heads = (queries, queries, 1, 1) if config.attention_output_gate else (queries, 1, 1)
        self.q_norm = self._norm_of("q_norm", config.num_attention_heads, layer, config, placement)
        self.k_norm = self._norm_of("k_norm", config.kv_heads, layer, config, placement)
        self.qkv = ColumnParallelLinear(
            f"layers.{layer}.attention.qkv",
            config.hidden_size,
            (config.kv_heads, sum(self.heads), config.head_dim),
            placement,
            bias=config.qkv_bias,
            std=config.init_method_std,
            matrices=Matrices(parts=self.heads, dim=1),
        )
        self.out = RowParallelLinear(
            f"layers.{layer}.attention.out",
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            placement,
            bias=config.add_bias_linear,
            std=residual_std(config),
        )

    def _offset_of(self, layer: int, config: ModelConfig, placement: Placement) -> nn.Parameter | None:
        if config.softmax_type != "learnable":
            return None
        spec = ParamSpec(
            f"layers.{layer}.attention.softmax_offset",
            (config.num_attention_heads,),
            InitialValues("normal", config.init_method_std),
            (Cut(0, "tp"),),
            weight_decay=False,
        )
        return placement.parameter(spec)

    @staticmethod
    def _norm_of(name: str, heads: int, layer: int, config: ModelConfig, placement: Placement) -> Norm | None:
        if not config.qk_layernorm:
            return None
        scope, decayed = config.qk_layernorm_scope, config.apply_wd_to_qk_layernorm
        features = config.head_dim * (heads if scope == "projection" else 1)
        name = f"layers.{layer}.attention.{name}"
        return Norm(name, config, placement, features, scope=scope, decayed=decayed)

    @property
    def last(self) -> RowParallelLinear:
        """The layer that makes the result, as it is."""
        return self.out

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | Included | None]:
        qkv = self.qkv(x, inputs.deferred)
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, *self.qkv.local_shape)  # [s, b, g/tp, q + 2, d]
        # One split, because its backward is one concatenation, while each slice would add a tensor of zeros.
        query, *gate, key, value = qkv.split(self.heads, dim=3)
        query = query.reshape(s, b, -1, qkv.shape[-1])  # [s, b, n/tp, d]
        key, value = key.squeeze(3), value.squeeze(3)  # [s, b, g/tp, d]
        context = computed_again(self.recompute, self._attend, query, key, value, inputs)
        if gate:
            shares = torch.sigmoid(inputs.narrow(gate[0].reshape(s, b, -1)).to(compute_dtype(x.dtype)))
            context = (context * shares).to(context.dtype)
        result: tuple[Tensor, Tensor | Included | None] = self.out(context, inputs.deferred)
        return result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs) -> Tensor:
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm.of_heads(query), self.k_norm.of_heads(key)
        if tables := (inputs.rows.rotary or ())[self.rotary]:
            if self.interleaved is not None:  # products of both do not depend on the order of channels
                query, key = halves(query, self.interleaved), halves(key, self.interleaved)
            query, key = apply_rotary(query, *tables), apply_rotary(key, *tables)
        core = self.core if inputs.core is None else inputs.core
        offset: Tensor | None = self.softmax_offset
        if self.softmax_type == "off-by-one":
            offset = query.new_zeros(query.shape[2])
        bias = self.softcap if self.slopes is None else self.slopes.on(query.device)
        return core(query, key, value, inputs, self.attends, bias, offset)
