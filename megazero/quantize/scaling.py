"""Inputs scaled by channel, so that weights or inputs are easier to round; the layer before undoes it.

AWQ (Lin et al. 2023, arXiv:2306.00978) enlarges the channels with large inputs, SmoothQuant (Xiao et al.
2022, arXiv:2211.10438) moves large inputs into the weights. A scale is divided out of a norm's weight, of the
values before an attention's output, or of the linear half of gated MLPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.formats.hf.packed import QuantizedWeight
from megazero.layers.attention import SelfAttention
from megazero.layers.mlp import MLP
from megazero.layers.norm import Norm
from megazero.layers.transformer import TransformerLayer
from megazero.mpu.param_spec import spec_of
from megazero.quantize.grid import Grid
from megazero.quantize.rtn import nearest, squared_error
from megazero.spec.model import LayerSpec
from megazero.spec.parts import AttentionSpec, MlpSpec

Halves = Mapping[str, QuantizedWeight]
"""Name -> the weight as it is quantized already."""
_TRIED = 20


@dataclass(frozen=True)
class Fold:
    """What comes before the inputs of a weight, and can be divided by a scale of each channel.

    Attributes:
        norm: the norm whose result they are; None for rows of a weight.
        weight, bias: the linear layer whose outputs they are, times others.
        rows: takes the rows of the inputs out of a tensor in the weight's shape, as a view.
    """

    norm: Norm | None = None
    weight: nn.Parameter | None = None
    bias: nn.Parameter | None = None
    rows: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def divide(self, scale: Tensor, grid: Grid, quantized: dict[str, QuantizedWeight]) -> None:
        """Divide by a scale [n], in place; a weight that is quantized already has its scales divided."""
        if self.norm is not None:
            shift = 1.0 if self.norm.centred else 0.0
            self.norm.weight.copy_((self.norm.weight.double() + shift) / scale - shift)
            if self.norm.bias is not None:
                self.norm.bias.div_(scale)
            return
        assert self.weight is not None, "a fold is into a norm or into rows of a weight"
        assert self.rows is not None, "a weight comes with its rows"
        if self.bias is not None:
            rows = self.rows(self.bias.unsqueeze(-1))
            rows.div_(scale.view(rows.shape))
        name, shape = spec_of(self.weight).name, self.weight.shape[:-1]
        coded = quantized.get(name)
        if coded is None:
            rows = self.rows(self.weight)
            rows.div_(scale.view(*rows.shape[:-1], 1))
            return
        scales = coded.scales.double().view(*shape, -1)
        rows = self.rows(scales)
        rows.div_(scale.view(*rows.shape[:-1], 1))
        changed = grid.rounded(scales.view(coded.scales.shape)).to(coded.scales.dtype)
        quantized[name] = QuantizedWeight(coded.codes, changed, coded.bits)
        self.weight.copy_(quantized[name].dequantized().view_as(self.weight))


def folds_of(layer: nn.Module, spec: LayerSpec) -> dict[str, Fold]:
    """The weights of a layer whose inputs can be scaled, and where the scale is divided out.

    Left out are inputs that others read too (routers, a norm that attention and MLP share, a residual after
    the norm), values with grouped keys, and inner activations that are not linear in anything.
    """
    if not isinstance(layer, TransformerLayer):
        return {}
    folds: dict[str, Fold] = {}
    attention, mlp = layer.attention, layer.mlp
    shared = spec.one_norm or spec.residual_after_norm
    if isinstance(attention, SelfAttention):
        qkv, part = attention.qkv, spec.attention
        if layer.input_norm is not None and not shared:
            folds[spec_of(qkv.weight).name] = Fold(layer.input_norm)
        if isinstance(part, AttentionSpec) and part.heads == part.groups and not part.gated:
            folds[spec_of(attention.out.weight).name] = Fold(
                weight=qkv.weight, bias=qkv.bias, rows=lambda whole: whole[:, -1]
            )
    if isinstance(mlp, MLP) and isinstance(spec.mlp, MlpSpec):
        if layer.mlp_norm is not None and not shared:
            folds[spec_of(mlp.up.weight).name] = Fold(layer.mlp_norm)
        activation = spec.mlp.activation
        if activation.gated and not activation.offset and activation.clamp is None:
            folds[spec_of(mlp.down.weight).name] = Fold(
                weight=mlp.up.weight, bias=mlp.up.bias, rows=lambda whole: whole[1]
            )
    return folds


def activity_scale(weights: Sequence[Tensor], mean: Tensor, gram: Tensor, grid: Grid) -> Tensor | None:
    """AWQ's scale [n] of the inputs of some weights [rows, n]; None if none is better than 1.

    It is that power of the mean magnitudes `mean` [n], of 20 from 0 to 0.95, with the least squared error of
    the outputs when the scaled weights are rounded. All float64.
    """
    best, least = None, torch.inf
    for step in range(_TRIED):
        scale = mean.pow(step / _TRIED).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = sum(
            squared_error(nearest(weight * scale, grid).dequantized().double() / scale - weight, gram)
            for weight in weights
        )
        if error < least:
            best, least = (scale if step else None), error
    return best


def smooth_scale(weights: Sequence[Tensor], most: Tensor, strength: float) -> Tensor:
    """SmoothQuant's scale [n]: max|x|^strength / max|w|^(1 - strength), of the largest inputs `most` [n].

    An input that is always 0 keeps the scale 1. All float64.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=1e-5)
    scale = (most.pow(strength) / largest.pow(1 - strength)).clamp(min=1e-5)
    return torch.where(most > 0, scale, torch.ones_like(scale))
