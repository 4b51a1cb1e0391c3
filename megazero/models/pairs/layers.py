"""The layers of T5: self-attention with biases and masks, cross-attention, and the decoder's layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from megazero.layers.attention import SelfAttention
from megazero.layers.attention_cores import KeyValueStore
from megazero.layers.computed_again import computed_again
from megazero.layers.inputs import Attends, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.mlp import MLP
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.layers.transformer import TransformerLayer
from megazero.mpu.matrices import Matrices
from megazero.mpu.rng import site_key
from megazero.ops.attention import ALL, AttentionCall, attend
from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.ops.counter_random import derive
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions
from megazero.spec.model import LayerSpec
from megazero.spec.parts import AttentionSpec, MlpSpec


@dataclass(frozen=True)
class PairInputs(LayerInputs):
    """The inputs of an encoder's or decoder's layer besides its hidden states.

    Attributes:
        bias: [1 or b, n/tp, s, t], added to the scores of self-attention; or None.
        mask: bool [b, 1, 1, s], False for the encoder's padding; None if there is none or `bias` masks it.
        encoded: [s, b, h] ([s/tp, b, h] under sequence parallelism), the encoder's output; None in the
            encoder's layers.
        encoded_positions: the positions of the encoder's rows.
        store: the key-value cache of a generation; None in training.
    """

    bias: Tensor | None = None
    mask: Tensor | None = None
    encoded: Tensor | None = None
    encoded_positions: Positions = range(0)
    store: PairStore | None = None


@runtime_checkable
class PairStore(KeyValueStore, Protocol):
    """A key-value cache of a generation: for self-attention, and for cross-attention to the encoder."""

    def of_encoder(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The cached keys and values [s, b, g/tp, d] of a layer's cross-attention; None before the first."""

    def keep_of_encoder(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Cache the keys and values [s, b, g/tp, d] of a layer's cross-attention."""


class StackAttention(SelfAttention):
    """Self-attention: the encoder's to all rows except padding, the decoder's to earlier rows.

    Padding comes last, so no row of the decoder attends to it.
    """

    def __init__(self, layer: int, spec: AttentionSpec, placement: Placement, *, recompute: bool = False):
        super().__init__(layer, spec, placement, recompute=recompute)
        self.tp = placement.tp

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs) -> Tensor:
        assert isinstance(inputs, PairInputs), "layers of T5 need `PairInputs`"
        if inputs.store is not None:
            key, value = inputs.store.extend(self.attends, key, value)
        causal = self.attends.causal
        call = AttentionCall(
            self.attends.scale_of(query),
            mask=None if causal else inputs.mask,
            bias=inputs.bias,
            dropout=inputs.attention_dropout(self.attends, self.tp.rank * query.shape[2]),
            pattern=ALL.causally(causal),
        )
        self.attends.see(query, key, call)
        return attend(query, key, value, call)


class CrossAttention(nn.Module):
    """The decoder's attention to the encoder's output: [t, b, h] -> ([t, b, h], bias still to be added).

    Keys and values have one weight of logical shape [groups, 2, d, h].

    Args:
        recompute: whether backward recomputes the attention core.
    """

    def __init__(self, layer: int, spec: AttentionSpec, placement: Placement, *, recompute: bool = False):
        super().__init__()
        self.attends = Attends(layer, False, spec.dropout, scale=spec.scale)
        self.recompute, self.tp = recompute, placement.tp
        name, heads, width, stream = f"layers.{layer}.cross", spec.heads, spec.head_dim, spec.stream
        sides: dict[str, Any] = {"bias": spec.qkv_bias, "std": stream.std}
        self.query = ColumnParallelLinear(f"{name}.query", stream.width, (heads, width), placement, **sides)
        self.key_value = ColumnParallelLinear(
            f"{name}.key_value",
            stream.width,
            (spec.groups, 2, width),
            placement,
            **sides,
            matrices=Matrices(parts=(1, 1), dim=1),
        )
        self.out = RowParallelLinear(
            f"{name}.out", heads * width, stream.width, placement, bias=stream.bias, std=stream.out_std
        )

    def forward(self, x: Tensor, inputs: PairInputs) -> tuple[Tensor, Tensor | None]:
        query = self.query(x, inputs.deferred)
        query = query.view(*query.shape[:2], *self.query.local_shape)  # [t, b, n/tp, d]
        key, value = self._keys_and_values(x, inputs)
        context = computed_again(self.recompute, self._attend, query, key, value, inputs)
        result: tuple[Tensor, Tensor | None] = self.out(context, inputs.deferred)
        return result

    def _keys_and_values(self, x: Tensor, inputs: PairInputs) -> tuple[Tensor, Tensor]:
        """Compute keys and values of the encoder's output, [s, b, g/tp, d] each; once in a generation."""
        kept = None if inputs.store is None else inputs.store.of_encoder(self.attends.layer)
        if kept is not None:
            return kept
        assert inputs.encoded is not None, "cross-attention needs the encoder's output"
        both = self.key_value(inputs.encoded.to(x.dtype), inputs.deferred)
        key, value = both.view(*both.shape[:2], *self.key_value.local_shape).unbind(3)
        if inputs.store is not None:
            inputs.store.keep_of_encoder(self.attends.layer, key, value)
        return key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: PairInputs) -> Tensor:
        rows, dropout = inputs.rows, None
        if rows.keys is not None and self.attends.dropout > 0.0:
            keys = derive(site_key("cross", self.attends.layer), rows.keys)
            first = self.tp.rank * query.shape[2]
            places = rows.positions, inputs.encoded_positions
            dropout = AttentionDropout(self.attends.dropout, keys, *places, first)
        call = AttentionCall(self.attends.scale_of(query), inputs.mask, dropout=dropout)
        self.attends.see(query, key, call)
        return attend(query, key, value, call)


class DecoderLayer(TransformerLayer):
    """A pre-norm layer of the decoder: self-attention, cross-attention, MLP.

    Args:
        layer, spec, placement, attention, mlp: as for `TransformerLayer`.
        cross: (normed [t, b, h], inputs) -> ([t, b, h], bias still to be added or None).
    """

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        placement: Placement,
        attention: nn.Module,
        cross: nn.Module,
        mlp: nn.Module,
    ):
        super().__init__(layer, spec, placement, attention, mlp)
        self.cross_norm = Norm(f"layers.{layer}.cross_norm", spec.norm, placement)
        self.cross = cross

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        assert self.input_norm is not None, "a rule requires pre-norm layers"
        dtype = self.placement.dtype
        normed, x = self.input_norm(x, both=True)
        half = self.attention(normed.to(dtype), inputs)
        normed, x = self._joint(half, x, self._dropout(inputs, "attention_out"), self.cross_norm)
        half = self.cross(normed.to(dtype), inputs)
        normed, x = self._joint(half, x, self._dropout(inputs, "cross_out"), self.mlp_norm)
        del half  # already added to x; frees its memory before the MLP runs
        out, bias, sums = self.mlp(normed.to(dtype), inputs)
        return bias_dropout_add(out.to(x.dtype), bias, x, self._dropout(inputs, "mlp_out")), sums


def layer_of(
    number: int, spec: LayerSpec, placement: Placement, *, recompute: bool, tiles: int
) -> TransformerLayer:
    """Build a layer of the encoder or the decoder.

    Args:
        number: number along the model; the encoder's layers come first.
        recompute: whether backward recomputes the attention core.
        tiles: number of row tiles of the MLP.
    """
    assert isinstance(spec.attention, AttentionSpec), "rules refuse other attention"
    assert isinstance(spec.mlp, MlpSpec), "rules refuse experts"
    attention = StackAttention(number, spec.attention, placement, recompute=recompute)
    mlp = MLP(f"layers.{number}.mlp", spec.mlp, placement, tiles=tiles)
    if spec.cross is None:
        return TransformerLayer(number, spec, placement, attention, mlp)
    cross = CrossAttention(number, spec.cross, placement, recompute=recompute)
    return DecoderLayer(number, spec, placement, attention, cross, mlp)
