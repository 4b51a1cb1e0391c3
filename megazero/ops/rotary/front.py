"""The public rotary position embedding: its angles, its application and the table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import row_chunks
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import TRAINING_FLOATS, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.native import NATIVE, address, adjacent, heads_of, on_native_cpu, rows_of
from megazero.ops.rotary.cuda import apply_rotary_cuda
from megazero.ops.rotary.reference import apply_rotary_reference


def rotary_table(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2 i / dim), each [s, 1, 1, dim/2] or [s, b, 1, dim/2].

    positions: int64 [s], or [s, b] if samples differ. dim: how many channels of a head are rotated, an even
    number. Angles are computed in fp32, as they were for published checkpoints. Raises ValueError if dim is
    odd or positions have another number of dims.
    """
    if dim % 2:
        raise ValueError(f"`dim` must be even, but is {dim}; channels are rotated in pairs.")
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"`positions` must be [s] or [s, b], but has shape {tuple(positions.shape)}; "
            "give one position per token."
        )
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    inverse_frequencies = 1.0 / base**exponents
    columns = positions.reshape(*positions.shape, *(1,) * (4 - positions.dim()))
    angles = columns.to(torch.float32) * inverse_frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """x [s, b, n, d] rotated by direction * angle, in chunks of positions that stay in cache."""
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
    """The rotation, which saves only the table; backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def apply_rotary_fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, n, d] rotated by the table's angles."""
    return apply(_Rotary, x, cos, sin)


def _turn_natively(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """x rotated by direction * angle in one pass of csrc/rotary."""
    x = adjacent(x)
    s, b, n, d = x.shape
    out = torch.empty(s, b, n, d, dtype=x.dtype)
    # A size of one stands for all rows or samples.
    steps = (cos.stride(dim) if cos.shape[dim] > 1 else 0 for dim in range(2))
    tables = (address(cos), address(sin), *steps)
    rows = rows_of(out, n * d, s * b)
    NATIVE.rotary(rows, b, n, cos.shape[-1], heads_of(x), *tables, direction, heads_of(out))
    return out


class _NativeRotary(torch.autograd.Function):
    """The rotation, which saves only the table; backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn_natively(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        cos, sin = ctx.saved_tensors
        return _turn_natively(grad, cos, sin, -1), None, None


def apply_rotary_native_cpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, n, d] in fp32 or bf16 on CPU, rotated by angles in fp32."""
    return apply(_NativeRotary, x, cos.contiguous(), sin.contiguous())


@dataclass(frozen=True)
class RotaryFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        table: the dtype of cosines and sines.
    """

    table: torch.dtype


ROTARY: Operator[Callable[[Tensor, Tensor, Tensor], Tensor]] = Operator(
    "rotary",
    (
        Implementation("native_cpu", apply_rotary_native_cpu, on_native_cpu(table=torch.float32)),
        Implementation("cuda", apply_rotary_cuda, on_cuda_kernels()),
        Implementation("fused", apply_rotary_fused, where(dtypes=TRAINING_FLOATS)),
        Implementation("reference", apply_rotary_reference),
    ),
    kinds_of_calls(RotaryFacts, table=(torch.float32, torch.float64)),
)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x [s, b, n, d] by the angles of `rotary_table`; the rest pass through.

    This is the halves convention: channel i pairs with channel i + dim/2 (GPT-NeoX, Hugging Face's Llama).
    The table is a constant: no gradient flows to it. The rotation is computed in the table's dtype and
    returned in x's.
    """
    return ROTARY.choose(RotaryFacts.of(x, table=cos.dtype)).fn(x, cos, sin)
