"""The short causal convolution of a Mamba-2 mixer, one channel at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from megazero.ops.autograd import Context, Gradients, apply

WIDTH = 4
_Ctx = Context[list[Tensor | None]]
"""Rows that a result is made of, as in Megatron-LM."""


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns [s, b, g, c], and the last rows of the input, [WIDTH - 1, b, g, c], for the next call.

    Args:
        x: [s, b, g, c].
        weight: [g, c, WIDTH], the last one for the row itself.
        bias: [g, c].
        before: the rows before the first, [WIDTH - 1, b, g, c]; None for zeros.
        segments: int [b, s], ascending; a row sees only rows of its own number. None for a single segment.
    """
    if before is None:
        before = x.new_zeros(WIDTH - 1, *x.shape[1:])
    rows, s = torch.cat((before, x)), len(x)
    seen: list[Tensor | None] = [None] * WIDTH
    if segments is not None:
        own = segments.t()
        numbers = (torch.cat((own[:1].expand(min(back, s), -1), own))[:s] for back in range(1, WIDTH))
        seen[1:] = [(own == earlier)[..., None, None].to(x.dtype) for earlier in numbers]
    return apply(_Taps, rows, weight, bias, seen), rows[s:]


class _Taps(Function):
    """Sums products of shifted rows and weights in place, which is far faster than a tensor for each."""

    @staticmethod
    def forward(ctx: _Ctx, rows: Tensor, weight: Tensor, bias: Tensor, seen: list[Tensor | None]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.kept = seen
        s, taps = len(rows) - WIDTH + 1, weight.unbind(-1)
        out, spare = torch.addcmul(bias, rows[WIDTH - 1 :], taps[-1]), torch.empty_like(rows[:s])
        for back in range(1, WIDTH):
            out.addcmul_(_masked(rows[WIDTH - 1 - back :][:s], seen[back], spare), taps[-1 - back])
        return out

    @staticmethod
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        rows, weight = ctx.saved_tensors
        s, taps = len(grad), weight.unbind(-1)
        grad_rows, spare = torch.zeros_like(rows), torch.empty_like(grad)
        grad_taps = []
        for back in reversed(range(WIDTH)):
            own = slice(WIDTH - 1 - back, WIDTH - 1 - back + s)
            reached = _masked(grad, ctx.kept[back], spare)
            grad_rows[own].addcmul_(reached, taps[-1 - back])
            grad_taps.append(torch.mul(reached, rows[own], out=spare).sum((0, 1)))
        return grad_rows, torch.stack(grad_taps, -1), grad.sum((0, 1)), None


def _masked(x: Tensor, seen: Tensor | None, spare: Tensor) -> Tensor:
    """x with unseen rows set to zero, written to `spare`; x itself if every row is seen."""
    return x if seen is None else torch.mul(x, seen, out=spare)
