"""A function of rows, tile by tile: the activations of one tile are alive (TiledMLP, Bekman et al. 2025).

Backward computes each tile again. A parameter's gradients of all tiles are added up before autograd sees
them, so hooks, such as the one that reduces over ranks, see one whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from megazero.ops.autograd import Context, Gradients, apply
from megazero.ops.chunks import compute_dtype

OfRows = Callable[[Tensor], Tensor]
_Ctx = Context[tuple[Any, OfRows, int, tuple[Tensor, ...]]]


def tile_size(x: Tensor, tiles: int) -> int:
    """The number of rows of x [s, ..., h] in each of `tiles` tiles; the last may have fewer.

    0 stands for tiles of about h rows, as in ALST.
    """
    number = tiles or math.ceil(x.numel() / x.shape[-1] ** 2)
    return max(1, math.ceil(len(x) / max(1, number)))


def tiles_of(x: Tensor, size: int) -> Iterator[Tensor]:
    """Views of x [s, ...], [size, ...] each; the last may be smaller."""
    return (x[first : first + size] for first in range(0, len(x), size))


class _Kept(Function):
    """The identity, which saves x for backward.

    A Function's tensors are saved after its forward, and recompute stops once it has all saved tensors. With
    x saved here, before the tiles, their forward runs twice instead of three times.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Gradients:
        return (grad,)


class _Tiled(Function):
    """`of_rows` of x [s, ...] by tiles. `keeper` saves x, or this does if it is None."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, keeper: object, of_rows: OfRows, size: int, *params: Tensor) -> Tensor:
        if keeper is None:
            ctx.save_for_backward(x)
        ctx.kept = keeper, of_rows, size, params
        return _in_tiles(x, of_rows, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        keeper, of_rows, size, own = ctx.kept
        (x,) = (keeper or ctx).saved_tensors
        wants_x, _, _, _, *wants = ctx.needs_input_grad
        params = [param for param, wanted in zip(own, wants, strict=True) if wanted]
        grad_x = torch.empty_like(x) if wants_x else None
        sums: list[Tensor] = []
        first = 0
        for rows, grad_rows in zip(tiles_of(x, size), tiles_of(grad, size), strict=True):
            rows = rows.detach().requires_grad_(wants_x)
            with torch.enable_grad():
                out = of_rows(rows)
            # Not `backward`: hooks of a parameter must see the sum over tiles.
            made = list(torch.autograd.grad(out, [*params, *([rows] if wants_x else [])], grad_rows))
            if grad_x is not None:
                grad_x[first : first + len(rows)] = made.pop()
            first += len(rows)
            _add(sums, made)
            del out, made  # before the next tile has its own
        totals = iter([total.to(param.dtype) for total, param in zip(sums, params, strict=True)])
        return grad_x, None, None, None, *(next(totals) if wanted else None for wanted in wants)


def _add(sums: list[Tensor], more: Sequence[Tensor]) -> None:
    """Add up gradients of tiles in fp32 (or fp64), so that many tiles round no more often than one."""
    if not sums:
        sums.extend(grad.to(compute_dtype(grad.dtype)) for grad in more)
        return
    for total, grad in zip(sums, more, strict=True):
        total += grad


def _in_tiles(x: Tensor, of_rows: OfRows, size: int) -> Tensor:
    whole: Tensor | None = None
    first = 0
    for rows in tiles_of(x, size):
        out = of_rows(rows)
        if whole is None:
            whole = out.new_empty(len(x), *out.shape[1:])
        whole[first : first + len(rows)] = out
        first += len(rows)
    assert whole is not None, "a sequence has rows"
    return whole


def tiled(of_rows: OfRows, x: Tensor, size: int, params: Sequence[Tensor]) -> Tensor:
    """`of_rows(x)`, computed for `size` entries of x's first dim at a time.

    Besides the result and, in backward, the gradient of x, only what one tile needs is in memory. It costs a
    second forward, within a recomputed unit too.

    Args:
        of_rows: rows [r, ..., h] -> [r, ..., n]; a row's result must depend on that row alone. It is called
            again in backward, and must then compute the same.
        x: [s, ..., h].
        size: the entries of a tile.
        params: the parameters that `of_rows` uses; each gets a gradient.
    """
    if not torch.is_grad_enabled():
        return _in_tiles(x, of_rows, size)
    keeper = None
    if x.requires_grad:
        x = apply(_Kept, x)
        keeper = x.grad_fn
    return apply(_Tiled, x, keeper, of_rows, size, *params)
