"""Linear layers that multiply 8-bit floats (Micikevicius et al. 2022).

A tensor is multiplied by a scale that takes its largest magnitude, its amax, near the largest number of the
format, rounded to e4m3 (the gradients of `hybrid` to e5m2), and multiplied with sums in fp32; the product
is divided by both scales. Masters, moments and everything between the products stay as they are.

The scale of the recipe ``tensorwise`` is that of the tensor's own amax. ``delayed`` (NVIDIA's Transformer
Engine) takes it from the amaxes of earlier steps, so that all micro-batches of a step have one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megazero.config.tree.precision import PrecisionConfig
from megazero.layers.collectives import gather_rows, reduce_scatter_rows
from megazero.layers.inputs import Deferred
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.transformer import TransformerLayer
from megazero.mpu.group import Group
from megazero.mpu.param_spec import spec_of
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.autograd import Gradients, apply

LARGEST = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0})
"""The largest number of each format."""
_INPUT, _WEIGHT, _GRADIENT = range(3)


@dataclass(frozen=True)
class Fp8Recipe:
    """The settings by which tensors become 8-bit floats.

    Attributes:
        gradients: the format of gradients; all other tensors are e4m3.
        delayed: whether a scale comes from earlier steps.
        margin: powers of two that a scale stays below the largest one.
        history: steps whose amaxes are kept, with ``delayed``.
        most_recent: whether the latest of them counts instead of the largest.
    """

    gradients: torch.dtype
    delayed: bool
    margin: int
    history: int
    most_recent: bool

    @classmethod
    def of(cls, config: PrecisionConfig) -> Fp8Recipe:
        """The recipe that the configuration describes."""
        gradients = torch.float8_e5m2 if config.fp8_format == "hybrid" else torch.float8_e4m3fn
        return cls(
            gradients,
            config.fp8_recipe == "delayed",
            config.fp8_margin,
            config.fp8_amax_history_len,
            config.fp8_amax_compute_algo == "most_recent",
        )

    def formats(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The formats of input, weight and gradient."""
        return torch.float8_e4m3fn, torch.float8_e4m3fn, self.gradients

    def scales(self, amaxes: Tensor, largest: Tensor, before: Tensor | float = 1.0) -> Tensor:
        """The scales that take amaxes near the largest numbers; `before` where an amax is 0 or not finite."""
        scales = largest / amaxes / 2.0**self.margin
        scales = scales.clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amaxes.isfinite() & (amaxes > 0), scales, before)


class Fp8Scaling:
    """The scales of one layer's input, weight and output gradient.

    Args:
        name: global name of the layer.
        recipe: the settings of the scales.
        group: the ranks that hold parts of the tensors; an amax is that of all parts.
        sliced_gradient: whether the gradient too is in parts.
        device: the scales' device.
    """

    def __init__(
        self, name: str, recipe: Fp8Recipe, group: Group, sliced_gradient: bool, device: torch.device
    ):
        self.name = name
        self.recipe = recipe
        self.group = group
        self.sliced_gradient = sliced_gradient
        self.largest = torch.stack([torch.full((), LARGEST[f], device=device) for f in recipe.formats()])
        self.scale = torch.ones(3, device=device)
        self.amax = torch.zeros(3, device=device)
        self.history = torch.zeros(recipe.history, 3, device=device)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of the input and the weight, or of parts of them."""
        amaxes = torch.stack([_amax(x), _amax(weight)])
        scale_x, scale_w = self._of(amaxes, slice(_INPUT, _GRADIENT), self.group).unbind()
        return scale_x, scale_w

    def backward(self, grad: Tensor) -> Tensor:
        """The scale of the gradient, or of a part of it."""
        group = self.group if self.sliced_gradient else SoloGroup()
        return self._of(_amax(grad).unsqueeze(0), slice(_GRADIENT, 3), group)[0]

    def _of(self, amaxes: Tensor, which: slice, group: Group) -> Tensor:
        if self.recipe.delayed:
            self.amax[which] = torch.maximum(self.amax[which], amaxes)
            return self.scale[which]
        if group.size > 1:
            group.all_reduce(amaxes, "max").wait()
        return self.recipe.scales(amaxes, self.largest[which])

    def advance(self) -> None:
        """Add the step's amaxes to the history, and compute the next step's scales."""
        # In place, because a CUDA graph knows these tensors by their addresses.
        self.history.copy_(torch.cat([self.amax.unsqueeze(0), self.history[:-1]]))
        latest = self.history[0] if self.recipe.most_recent else self.history.amax(0)
        self.scale.copy_(self.recipe.scales(latest, self.largest, self.scale))
        self.amax.zero_()


def _amax(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x.detach(), torch.inf)
    return largest.float()


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x times `scale`, rounded to `dtype`.

    A value that is too large becomes the largest number of `dtype`; inf and NaN become NaN.
    """
    wide = x.float() * scale
    limit = LARGEST[dtype]
    # A difference of equals is 0, but NaN of infinities, which the limit would hide from the loss scaler.
    return (wide.clamp(-limit, limit) + (wide - wide)).to(dtype)


def fp8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T / (scale_a scale_b) for 8-bit floats a [m, k] and b [n, k], summed in fp32: [m, n]."""
    if a.is_cuda:
        inverses = (scale_a.reciprocal(), scale_b.reciprocal())
        product = torch._scaled_mm(_padded(a), _padded(b).t(), *inverses, out_dtype=dtype)
        return product[: len(a), : len(b)]
    return ((a.float() @ b.float().t()) * (scale_a.reciprocal() * scale_b.reciprocal())).to(dtype)


def _padded(codes: Tensor) -> Tensor:
    """The codes, contiguous and padded with zeros to multiples of 16 rows and columns for tensor cores."""
    rows, columns = (-size % 16 for size in codes.shape)
    if not rows and not columns:
        return codes.contiguous()
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


class _Fp8Linear(Function):
    """`x @ weight.T + bias`, forward and backward in 8-bit products; keeps its input as 8-bit floats.

    It travels as 8-bit floats between the ranks of a sequence-parallel group, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        scaling: Fp8Scaling,
    ) -> Tensor:
        scale_x, scale_w = (scale.clone() for scale in scaling.forward(x, weight))
        shard = to_fp8(x, scale_x, torch.float8_e4m3fn)
        ctx.save_for_backward(shard, weight, scale_x, scale_w)
        ctx.group, ctx.sequence_parallel, ctx.scaling = group, sequence_parallel, scaling
        ctx.has_bias, ctx.dtype = bias is not None, x.dtype
        whole = _gathered(shard, group) if sequence_parallel else shard
        codes = to_fp8(weight, scale_w, torch.float8_e4m3fn)
        y = fp8_product(whole.flatten(0, -2), codes, scale_x, scale_w, x.dtype)
        y = y if bias is None else y + bias
        out: Tensor = y.unflatten(0, whole.shape[:-1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        shard, weight, scale_x, scale_w = ctx.saved_tensors
        group: Group = ctx.group
        scale_g = ctx.scaling.backward(grad)
        rows = to_fp8(grad.flatten(0, -2), scale_g, ctx.scaling.recipe.gradients)
        codes = to_fp8(weight, scale_w, torch.float8_e4m3fn)
        grad_x = fp8_product(rows, codes.t(), scale_g, scale_w, ctx.dtype).unflatten(0, grad.shape[:-1])
        whole = shard
        if ctx.sequence_parallel:
            whole, grad_x = _gathered(shard, group), reduce_scatter_rows(grad_x, group)
        elif group.size > 1:
            group.all_reduce(grad_x).wait()
        inputs = whole.flatten(0, -2)
        grad_weight = fp8_product(rows.t(), inputs.t(), scale_g, scale_x, weight.dtype)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _gathered(codes: Tensor, group: Group) -> Tensor:
    return gather_rows(codes.view(torch.uint8), group).view(codes.dtype)


def fp8_linear(
    scaling: Fp8Scaling,
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: Group,
    sequence_parallel: bool,
    deferred: Deferred | None = None,
) -> Tensor:
    """`column_linear` in 8-bit products: x [s, b, h] or [s/tp, b, h] -> [s, b, n/tp].

    A pass without gradients records no amax, so an evaluation changes no later step.
    """
    assert deferred is None, "rules refuse a split backward in 8-bit products"
    matrix, vector = weight.flatten(0, -2), None if bias is None else bias.flatten()
    if torch.is_grad_enabled():
        return apply(_Fp8Linear, x, matrix, vector, group, sequence_parallel, scaling)
    kept = scaling.amax.clone()
    y = apply(_Fp8Linear, x, matrix, vector, group, sequence_parallel, scaling)
    scaling.amax.copy_(kept)
    return y


class Fp8State:
    """The scales of all layers of this stage, and the amaxes that they keep from step to step.

    Args:
        scalings: the scalings of the stage's linear layers.
        stage: the ranks of the stage, which agree on amaxes.
    """

    def __init__(self, scalings: Iterable[Fp8Scaling], stage: Group):
        self.scalings = tuple(scaling for scaling in scalings if scaling.recipe.delayed)
        self.stage = stage

    def advance(self) -> None:
        """End a step: the amax of a tensor is that of all micro-batches and all ranks that hold parts."""
        if not self.scalings:
            return
        amaxes = torch.stack([scaling.amax for scaling in self.scalings])
        self.stage.all_reduce(amaxes, "max").wait()
        for scaling, amax in zip(self.scalings, amaxes, strict=True):
            scaling.amax.copy_(amax)
            scaling.advance()

    def state(self) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint by global name: [steps, 3] histories, and the scales [3] in use.

        They are equal on all ranks of the stage.
        """
        tensors = {}
        for scaling in self.scalings:
            tensors[f"{scaling.name}.amax_history"] = scaling.history
            tensors[f"{scaling.name}.scale"] = scaling.scale
        return tensors


def use_fp8(
    blocks: Iterable[nn.Module], config: PrecisionConfig, layers: int, device: torch.device
) -> list[Fp8Scaling]:
    """Make the linear layers of the transformer layers among `blocks` multiply 8-bit floats from now on.

    Args:
        blocks: the blocks of a chunk; embedding and head stay as they are.
        config: the recipe, and which layers at both ends of the model are left out.
        layers: the number of layers of the whole model.
        device: the scales' device; parameters may still be on the meta device.

    Returns:
        The scales, which an `Fp8State` keeps.
    """
    recipe, left_out = Fp8Recipe.of(config), config.layers_in_16_bits(layers)
    scalings = []
    for block in blocks:
        if not isinstance(block, TransformerLayer) or block.layer in left_out:
            continue
        for module in block.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                sliced_gradient = isinstance(module, ColumnParallelLinear)
                name = spec_of(module.weight).name.removesuffix(".weight")
                scaling = Fp8Scaling(name, recipe, module.placement.tp, sliced_gradient, device)
                module.product = partial(fp8_linear, scaling)
                scalings.append(scaling)
    return scalings
