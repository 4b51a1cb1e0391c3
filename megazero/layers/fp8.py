"""Linear layers that multiply 8-bit floats (Micikevicius et al. 2022).

A tensor is multiplied by a scale that brings its largest magnitude (its amax) near the largest number of the
format, and rounded to e4m3 (with `hybrid`, gradients to e5m2). Products are summed in fp32 and divided by
both scales. Masters, moments and everything between the products are unchanged.

The recipe ``tensorwise`` takes the scale from the tensor's own amax, ``delayed`` (NVIDIA's Transformer
Engine) from the amaxes of earlier steps, so that all micro-batches of a step share one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megazero.config.tree.precision import PrecisionConfig
from megazero.layers.collectives import gather_rows, reduce_scatter_rows
from megazero.layers.inputs import Deferred
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.transformer import layers_of
from megazero.mpu.group import Group
from megazero.mpu.param_spec import spec_of
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.autograd import Gradients, apply
from megazero.ops.to_fp8 import LARGEST, amax, to_fp8

_INPUT, _WEIGHT, _GRADIENT = range(3)


@dataclass(frozen=True)
class Fp8Recipe:
    """How tensors are converted to 8-bit floats.

    Attributes:
        gradients: the format of gradients; all other tensors are e4m3.
        delayed: whether a scale comes from earlier steps.
        margin: the power of two by which a scale stays below the largest possible one.
        history: the number of steps whose amaxes are kept, with ``delayed``.
        most_recent: whether the latest amax sets the scale, instead of the largest one kept.
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
        """The scales for these amaxes; `before` where an amax is 0 or not finite."""
        scales = largest / amaxes / 2.0**self.margin
        scales = scales.clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amaxes.isfinite() & (amaxes > 0), scales, before)


@dataclass(frozen=True)
class Codes:
    """A matrix as 8-bit floats.

    Attributes:
        rows: [m, k].
        columns: the transpose, [k, m] in memory; None if it was not written.
        inverse: 1 / the scale, a float32 scalar.
    """

    rows: Tensor
    columns: Tensor | None
    inverse: Tensor

    @property
    def turned(self) -> Tensor:
        """The transpose [k, m], in memory or as a view."""
        return self.rows.t() if self.columns is None else self.columns


class Fp8Scaling:
    """The scales of one layer's input, weight and output gradient, and the layer's product.

    Within `Fp8State.passes` weights do not change, so their codes are made once and kept.

    Args:
        name: global name of the layer.
        recipe: the settings of the scales.
        group: the ranks that hold parts of the tensors; an amax is that of all parts.
        sliced_gradient: whether the gradient is in parts too.
        device: the scales' device.
        keeps: whether codes of the weight may be kept. Not if the weight itself is freed between uses, nor in
            a CUDA graph, which would keep the codes of the step in which it was captured.
    """

    def __init__(
        self,
        name: str,
        recipe: Fp8Recipe,
        group: Group,
        sliced_gradient: bool,
        device: torch.device,
        keeps: bool = True,
    ):
        self.name = name
        self.recipe = recipe
        self.groups = (group, group, group if sliced_gradient else SoloGroup())
        self.keeps = keeps
        self.passing = False
        self.kept: Codes | None = None
        self.largest = torch.stack([torch.full((), LARGEST[f], device=device) for f in recipe.formats()])
        self.scale = torch.ones(3, device=device)
        self.inverse = torch.ones(3, device=device)  # of `scale`, while `passing`
        self.amax = torch.zeros(3, device=device)
        self.history = torch.zeros(recipe.history, 3, device=device)

    def __call__(
        self,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        deferred: Deferred | None = None,
    ) -> Tensor:
        """`column_linear` in 8-bit products: x [s, b, h] or [s/tp, b, h] -> [s, b, n/tp].

        A pass without gradients records no amax, so an evaluation does not change later steps.
        """
        assert deferred is None, "rules refuse a split backward in 8-bit products"
        matrix, vector = weight.flatten(0, -2), None if bias is None else bias.flatten()
        kept, notes = self.weight_codes(weight), torch.is_grad_enabled()
        return apply(_Fp8Linear, x, matrix, vector, group, sequence_parallel, self, kept, notes)

    def weight_codes(self, weight: Tensor) -> Codes | None:
        """The codes of the weight [..., h] as [n, h], made by a step's first call; None if none are kept."""
        if torch.compiler.is_compiling():
            return self.kept
        if not (self.passing and self.keeps):
            return None
        if self.kept is None:
            with torch.no_grad():
                matrix = weight.detach().flatten(0, -2)
                self.kept = self.cast(_WEIGHT, matrix, self.scale_of(_WEIGHT, matrix))
        return self.kept

    def scale_of(self, which: int, x: Tensor) -> Tensor:
        """The scale of a tensor, or of a part of it: a float32 scalar."""
        if self.recipe.delayed:
            return self.scale[which]
        largest, group = amax(x), self.groups[which]
        if group.size > 1:
            group.all_reduce(largest, "max").wait()
        return self.recipe.scales(largest, self.largest[which])

    def cast(self, which: int, x: Tensor, scale: Tensor, *, notes: bool = True, turns: bool = True) -> Codes:
        """The codes of x [m, k], with the transpose if `turns` on a GPU; if `notes`, the step's amax includes
        x's.
        """
        noted = self.amax[which] if notes and self.recipe.delayed else None
        inverse = self.inverse[which] if self.passing and self.recipe.delayed else scale.reciprocal()
        turned = turns and on_tensor_cores(x)  # elsewhere a product takes a view
        return Codes(*to_fp8(x, scale, self.recipe.formats()[which], noted=noted, turned=turned), inverse)


def products_in_8_bits(layer: nn.Module) -> list[tuple[Fp8Scaling, nn.Parameter]]:
    """The scales of a layer's products of 8-bit floats, each with its weight."""
    linears = (m for m in layer.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear)))
    return [(m.product, m.weight) for m in linears if isinstance(m.product, Fp8Scaling)]


def on_tensor_cores(x: Tensor) -> bool:
    """Whether `torch._scaled_mm` computes products of such tensors; it needs both operands by rows in memory.

    Devices before Ada (8.9) have no products of 8-bit floats: there, as on a CPU, fp32 multiplies the codes.
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def fp8_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """a b^T inverse_a inverse_b for 8-bit floats a [m, k] and b [n, k], summed in fp32: [m, n].

    `fast` lets tensor cores keep fewer digits of their sums, as Transformer Engine does in forward.
    """
    if on_tensor_cores(a):
        matrices = _padded(a), _padded(b).t()
        product = torch._scaled_mm(*matrices, inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)
        return product[: len(a), : len(b)]
    return ((a.float() @ b.float().t()) * (inverse_a * inverse_b)).to(dtype)


def _padded(codes: Tensor) -> Tensor:
    """The codes, contiguous and padded with zeros to multiples of 16 rows and columns for tensor cores."""
    rows, columns = (-size % 16 for size in codes.shape)
    if not rows and not columns:
        return codes.contiguous()
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


class _Fp8Linear(Function):
    """`x @ weight.T + bias`, forward and backward in 8-bit products; keeps its input as 8-bit floats.

    Ranks of a sequence-parallel group also exchange the input as 8-bit floats.
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
        kept: Codes | None,
        notes: bool,
    ) -> Tensor:
        matrix = x.flatten(0, -2)
        turns = notes and not sequence_parallel
        inputs = scaling.cast(_INPUT, matrix, scaling.scale_of(_INPUT, x), notes=notes, turns=turns)
        ctx.group, ctx.sequence_parallel, ctx.scaling = group, sequence_parallel, scaling
        ctx.dtype, ctx.shape = x.dtype, x.shape
        ctx.by_column, ctx.kept = inputs.columns is not None, kept is not None
        if kept is None:
            scale = scaling.scale_of(_WEIGHT, weight)
            codes = scaling.cast(_WEIGHT, weight, scale, notes=notes, turns=False)
            saved, ctx.weight_dtype = (weight, scale), weight.dtype
        else:
            codes = kept
            saved, ctx.weight_dtype = (codes.turned, codes.inverse), weight.dtype
        held = inputs.rows if inputs.columns is None else inputs.columns
        ctx.save_for_backward(held, inputs.inverse, *saved)
        shard = inputs.rows.view(x.shape)
        whole = _gathered(shard, group) if sequence_parallel else shard
        y = fp8_product(whole.flatten(0, -2), codes.rows, inputs.inverse, codes.inverse, x.dtype, fast=True)
        y = y if bias is None else y + bias
        out: Tensor = y.unflatten(0, whole.shape[:-1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        held, inverse, weight, scale = ctx.saved_tensors
        scaling, group = ctx.scaling, ctx.group
        if ctx.kept:
            turned, weight_inverse = weight, scale
        else:
            codes = scaling.cast(_WEIGHT, weight, scale, notes=False)
            turned, weight_inverse = codes.turned, codes.inverse
        rows = grad.flatten(0, -2)
        grads = scaling.cast(_GRADIENT, rows, scaling.scale_of(_GRADIENT, grad))
        grad_x = fp8_product(grads.rows, turned, grads.inverse, weight_inverse, ctx.dtype)
        grad_x = grad_x.unflatten(0, grad.shape[:-1])
        if ctx.sequence_parallel:
            held, grad_x = _gathered(held.view(ctx.shape), group), reduce_scatter_rows(grad_x, group)
        elif group.size > 1:
            group.all_reduce(grad_x).wait()
        inputs = held if ctx.by_column else held.flatten(0, -2).t()
        grad_weight = fp8_product(grads.turned, inputs, grads.inverse, inverse, ctx.weight_dtype)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _gathered(codes: Tensor, group: Group) -> Tensor:
    return gather_rows(codes.view(torch.uint8), group).view(codes.dtype)


class Fp8State:
    """The scales of all layers of this stage, and the amaxes that they keep from step to step.

    Args:
        scalings: the scalings of the stage's linear layers, of one recipe.
        stage: the ranks of the stage, which agree on amaxes.
    """

    def __init__(self, scalings: Iterable[Fp8Scaling], stage: Group):
        self._all = tuple(scalings)
        self.scalings = tuple(scaling for scaling in self._all if scaling.recipe.delayed)
        self.stage = stage

    @contextmanager
    def passes(self) -> Iterator[None]:
        """A context for the forwards and backwards of one step, which all use the same weights and scales.

        It ends before anything changes weights: an update, a checkpoint or a guard.
        """
        if self.scalings:
            inverses = torch.stack([scaling.scale for scaling in self.scalings]).reciprocal()
            torch._foreach_copy_([scaling.inverse for scaling in self.scalings], list(inverses))
        try:
            for scaling in self._all:
                scaling.passing = True
            yield
        finally:
            for scaling in self._all:
                scaling.passing, scaling.kept = False, None

    @torch.no_grad()
    def advance(self) -> None:
        """End a step: reduce each tensor's amax over the ranks that hold parts of it, and update the scales.

        The step's amaxes, over all micro-batches, enter the histories that give the next scales. The number
        of launches does not grow with the number of layers.
        """
        if not self.scalings:
            return
        first = self.scalings[0]
        amaxes, histories, scales, inputs = (
            [getattr(scaling, name) for scaling in self.scalings]
            for name in ("amax", "history", "scale", "largest")
        )
        latest = torch.stack(amaxes)
        self.stage.all_reduce(latest, "max").wait()
        history = torch.cat([latest.unsqueeze(1), torch.stack(histories)[:, :-1]], 1)
        if not first.recipe.most_recent:
            latest = history.amax(1)
        following = first.recipe.scales(latest, inputs[0], torch.stack(scales))
        # In place, because a CUDA graph knows these tensors by their addresses.
        torch._foreach_copy_(histories, list(history))
        torch._foreach_copy_(scales, list(following))
        torch._foreach_zero_(amaxes)

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
    blocks: Iterable[nn.Module],
    config: PrecisionConfig,
    layers: int,
    device: torch.device,
    keeps: bool = True,
) -> list[Fp8Scaling]:
    """Make the linear layers of the transformer layers among `blocks` multiply 8-bit floats from now on.

    Args:
        blocks: the blocks of a chunk; embedding and head stay as they are.
        config: the recipe, and which layers at both ends of the model are left out.
        layers: the number of layers of the whole model; layers of multi-token prediction are never left out.
        device: the scales' device; parameters may still be on the meta device.
        keeps: whether codes of weights may be kept during a step, a byte or two for each element.

    Returns:
        The scalings, for an `Fp8State`.
    """
    if config.fp8_format == "none":
        return []
    recipe, left_out = Fp8Recipe.of(config), config.layers_in_16_bits(layers)
    scalings = []
    for layer in layers_of(blocks):
        if layer.layer in left_out:
            continue
        for module in layer.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                sliced_gradient = isinstance(module, ColumnParallelLinear)
                name = spec_of(module.weight).name.removesuffix(".weight")
                scaling = Fp8Scaling(name, recipe, module.placement.tp, sliced_gradient, device, keeps)
                module.product = scaling
                scalings.append(scaling)
    return scalings
