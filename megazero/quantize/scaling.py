"""Inputs scaled by channel, so that weights or inputs are easier to round; the layer before undoes it.

AWQ (Lin et al. 2023, arXiv:2306.00978) enlarges the channels with large inputs, SmoothQuant (Xiao et al.
2022, arXiv:2211.10438) moves large inputs into the weights. A scale is divided out of a norm's weight, of the
values before an attention's output, or of the linear half of gated MLPs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.formats.hf.packed import QuantizedWeight
from megazero.layers.attention import SelfAttention
from megazero.layers.linear import ColumnParallelLinear
from megazero.layers.mlp import MLP
from megazero.layers.norm import Norm
from megazero.layers.transformer import TransformerLayer
from megazero.mpu.param_spec import spec_of
from megazero.quantize.grid import Grid
from megazero.quantize.rtn import nearest, squared_error
from megazero.spec.model import LayerSpec
from megazero.spec.parts import AttentionSpec, MlpSpec

Fold = Callable[[Tensor, Grid, dict[str, QuantizedWeight]], None]
"""Divides by a scale [n], in place, what makes the n inputs of a weight; given the grid, and the weights that
are quantized already, of which it divides the scales."""
_TRIED = 20


def _into_norm(norm: Norm) -> Fold:
    def divide(scale: Tensor, grid: Grid, quantized: dict[str, QuantizedWeight]) -> None:
        shift = 1.0 if norm.centred else 0.0
        norm.weight.copy_((norm.weight.double() + shift) / scale - shift)
        if norm.bias is not None:
            norm.bias.div_(scale)

    return divide


def _into_rows(linear: ColumnParallelLinear, rows: Callable[[Tensor], Tensor]) -> Fold:
    """Into the rows of a weight that `rows` takes out of a tensor of its shape, as a view."""

    def divide(scale: Tensor, grid: Grid, quantized: dict[str, QuantizedWeight]) -> None:
        def divided(whole: Tensor) -> None:
            view = rows(whole)
            view.div_(scale.view(*view.shape[:-1], 1))

        weight = linear.weight
        if linear.bias is not None:
            divided(linear.bias.unsqueeze(-1))
        coded = quantized.get(spec_of(weight).name)
        if coded is None:
            divided(weight)
            return
        scales = coded.scales.double().view(*weight.shape[:-1], -1)
        divided(scales)
        changed = replace(coded, scales=grid.rounded(scales.view(coded.scales.shape)).to(coded.scales.dtype))
        quantized[spec_of(weight).name] = changed
        weight.copy_(changed.dequantized().view_as(weight))

    return divide


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
            folds[spec_of(qkv.weight).name] = _into_norm(layer.input_norm)
        if isinstance(part, AttentionSpec) and part.heads == part.groups and not part.gated:
            folds[spec_of(attention.out.weight).name] = _into_rows(qkv, lambda whole: whole[:, -1])
    if isinstance(mlp, MLP) and isinstance(spec.mlp, MlpSpec):
        if layer.mlp_norm is not None and not shared:
            folds[spec_of(mlp.up.weight).name] = _into_norm(layer.mlp_norm)
        activation = spec.mlp.activation
        if activation.gated and not activation.offset and activation.clamp is None:
            folds[spec_of(mlp.down.weight).name] = _into_rows(mlp.up, lambda whole: whole[1])
    return folds


def activity_scale(weight: Tensor, mean: Tensor, gram: Tensor, grid: Grid) -> Tensor | None:
    """AWQ's scale [n] of the inputs of a weight [rows, n]; None if none is better than 1.

    It is that power of the mean magnitudes `mean` [n], of 20 from 0 to 0.95, with the least squared error of
    the outputs when the scaled weight is rounded. All float64.
    """
    best, least = None, torch.inf
    for step in range(_TRIED):
        scale = mean.pow(step / _TRIED).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        made = nearest(weight * scale, grid).dequantized().double() / scale
        if (error := squared_error(made - weight, gram)) < least:
            best, least = (scale if step else None), error
    return best


def smooth_scale(weight: Tensor, most: Tensor, strength: float) -> Tensor:
    """SmoothQuant's scale [n]: max|x|^strength / max|w|^(1 - strength), of the largest inputs `most` [n].

    An input that is always 0 keeps the scale 1. All float64.
    """
    largest = weight.abs().amax(0).clamp(min=1e-5)
    scale = (most.pow(strength) / largest.pow(1 - strength)).clamp(min=1e-5)
    return torch.where(most > 0, scale, torch.ones_like(scale))
