"""Rotary position embedding that saves only the table; its backward is the turn by minus the angle."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import row_chunks


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """x [s, b, n, d] turned by direction * angle, in chunks of positions that stay in cache."""
    half = cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., 2 * half :] = x[..., 2 * half :]
    for chunk in row_chunks(x, x.shape[0], x[0].numel() if x.shape[0] else 1):
        wide = x[chunk, ..., : 2 * half].to(cos.dtype)
        first, second = wide[..., :half], wide[..., half:]
        turned = out[chunk] if out.dtype == cos.dtype else torch.empty_like(wide)
        torch.mul(first, cos[chunk], out=turned[..., :half])
        torch.mul(second, cos[chunk], out=turned[..., half : 2 * half])
        turned[..., :half].addcmul_(second, sin[chunk], value=-direction)
        turned[..., half : 2 * half].addcmul_(first, sin[chunk], value=direction)
        if out.dtype != cos.dtype:
            out[chunk, ..., : 2 * half] = turned
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _turn(grad, *ctx.saved_tensors, -1), None, None


def apply_rotary_fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, n, d] turned by the table's angles."""
    return _Rotary.apply(x, cos, sin)
