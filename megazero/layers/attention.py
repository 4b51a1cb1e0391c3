"""Self-attention, with its heads sliced over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.layers.attention_cores import core_of
from megazero.layers.computed_again import computed_again
from megazero.layers.inputs import Attends, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
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
from megazero.spec.parts import AttentionSpec, NormSpec


class SelfAttention(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added); both hold s/tp rows under sequence parallelism.

    If the inputs say which rows are wanted, the result is [r, b, h] and holds only these.

    Queries, keys and values come from one weight of logical shape [groups, queries per group + 2, d, h]: a
    group's query heads, then its key, then its value, so that slicing over groups keeps each group whole.
    With an output gate, the gates of a group's query heads follow these heads.

    Args:
        recompute: whether to drop the attention core's activations and compute them again in backward
            (selective recompute, Korthikanti et al. 2022).
    """

    def __init__(self, layer: int, spec: AttentionSpec, placement: Placement, *, recompute: bool = False):
        super().__init__()
        name, stream = f"layers.{layer}.attention", spec.stream
        pattern = pattern_of(spec.sight, layer, placement.tp)
        self.attends = Attends(layer, spec.sight.causal, spec.dropout, pattern, spec.scale)
        self.core = core_of(placement, layer)
        self.slopes = OwnSlopes.of(spec.heads, placement) if spec.alibi else None
        self.softcap = None if spec.softcap is None else Softcap(spec.softcap)
        self.softmax_type = spec.softmax
        self.softmax_offset = self._offset_of(name, spec, placement)
        self.rotary = rotary_tables_at(spec.rotary)
        self.interleaved = spec.interleaved
        self.recompute = recompute
        queries = spec.heads // spec.groups
        self.heads = (queries, queries, 1, 1) if spec.gated else (queries, 1, 1)

        def norm(which: str, of: NormSpec | None) -> Norm | None:
            return None if of is None else Norm(f"{name}.{which}", of, placement)

        self.q_norm, self.k_norm = norm("q_norm", spec.q_norm), norm("k_norm", spec.k_norm)
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            stream.width,
            (spec.groups, sum(self.heads), spec.head_dim),
            placement,
            bias=spec.qkv_bias,
            std=stream.std,
            matrices=Matrices(parts=self.heads, dim=1),
        )
        self.out = RowParallelLinear(
            f"{name}.out",
            spec.heads * spec.head_dim,
            stream.width,
            placement,
            bias=stream.bias,
            std=stream.out_std,
        )

    @staticmethod
    def _offset_of(name: str, spec: AttentionSpec, placement: Placement) -> nn.Parameter | None:
        if spec.softmax != "learnable":
            return None
        drawn = InitialValues("normal", spec.stream.std)
        cuts = (Cut(0, "tp"),)
        return placement.parameter(
            ParamSpec(f"{name}.softmax_offset", (spec.heads,), drawn, cuts, weight_decay=False)
        )

    @property
    def last(self) -> RowParallelLinear:
        """The linear layer whose result is this module's."""
        return self.out

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | Included | None]:
        qkv = self.qkv(x, inputs.deferred)
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, *self.qkv.local_shape)  # [s, b, g/tp, q + 2, d]
        gate: list[Tensor] = []
        # One operator, whose backward is one concatenation; slices would each add a tensor of zeros.
        if self.heads == (1, 1, 1):
            query, key, value = qkv.unbind(3)  # [s, b, n/tp, d]
        else:
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
