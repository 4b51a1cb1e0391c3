"""Rotary position embedding (Su et al. 2021), halves convention (GPT-NeoX, Hugging Face's Llama)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import row_chunks
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import TRAINING_FLOATS, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, adjacent, heads_of, on_native_cpu, rows_of
from megazero.ops.rotary_frequencies import UNSCALED, RotaryScaling, rotary_frequencies


@dataclass(frozen=True)
class RotaryFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        table: the dtype of cosines and sines.
    """

    table: torch.dtype


def rotary_table(
    positions: Tensor,
    dim: int,
    base: float,
    dtype: torch.dtype = torch.float32,
    *,
    scaling: RotaryScaling = UNSCALED,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, each [s, 1, 1, dim/2] or [s, b, 1, dim/2].

    Args:
        positions: int64 [s], or [s, b] if samples differ.
        dim: how many channels of a head are rotated, an even number.
        base: the frequency of pair i is base^(-2 i / dim) radians per position.
        dtype: of the result.
        scaling: changes the frequencies, and multiplies cosines and sines by its magnitude.
        exact: whether angles are computed in fp64. In fp32, as for published checkpoints, the fastest ones
            are wrong by 0.009 rad at position 131,072 and by 0.07 at 1M.

    Raises:
        ValueError: `dim` is odd, or positions have another number of dims.
    """
    if dim % 2:
        raise ValueError(f"`dim` must be even, but is {dim}; channels are rotated in pairs.")
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"`positions` must be [s] or [s, b], but has shape {tuple(positions.shape)}; "
            "give one position per token."
        )
    wide = torch.float64 if exact else torch.float32
    frequencies = rotary_frequencies(dim, base, wide, positions.device, scaling)
    columns = positions.reshape(*positions.shape, *(1,) * (4 - positions.dim()))
    angles = columns.to(wide) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos.to(dtype), sin.to(dtype)


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels i and i + dim/2 are rotated by angle i; channels from dim on pass through."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


# (x [s, b, n, d], cos, sin, direction) -> x rotated by direction * angle, contiguous
_Turn = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class _Rotary(torch.autograd.Function):
    """The rotation, which saves only the table; backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Context[_Turn], x: Tensor, cos: Tensor, sin: Tensor, turn: _Turn) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kept = turn
        return turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[_Turn], grad: Tensor) -> Gradients:
        cos, sin = ctx.saved_tensors
        return ctx.kept(grad, cos, sin, -1), None, None, None


def _turned_natively(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """One pass of csrc/rotary."""
    x = adjacent(x)
    s, b, n, d = x.shape
    out = torch.empty(s, b, n, d, dtype=x.dtype)
    rows, (places, samples, _, half) = rows_of(out, n * d, s * b), cos.shape
    # A size of one stands for all rows or samples.
    steps = cos.stride(0) if places > 1 else 0, cos.stride(1) if samples > 1 else 0
    tables = (cos.data_ptr(), sin.data_ptr(), *steps)
    NATIVE.rotary(rows, b, n, half, heads_of(x), *tables, direction, heads_of(out))
    return out


def _turned_in_chunks(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """The rotation in chunks of positions that stay in cache."""
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


def _turned_on_gpu(library: KernelLibrary, x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """One launch of csrc/rotary. Queries and keys are parts of one projection: it goes by their strides."""
    x = adjacent(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((reach if x.numel() else 0,), (1,))
    sizes, by_sample = (*x.shape, cos.shape[-1]), int(cos.shape[1] > 1)
    tables = (cos, sin, by_sample, float(direction))
    library.launch("rotary", x.dtype, *sizes, memory, *x.stride()[:3], *tables, y)
    return y


def apply_rotary_native_cpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, n, d] in fp32 or bf16 on CPU, rotated by angles in fp32."""
    return apply(_Rotary, x, cos.contiguous(), sin.contiguous(), _turned_natively)


def apply_rotary_cuda(x: Tensor, cos: Tensor, sin: Tensor, kernels: KernelLibrary | None = None) -> Tensor:
    """x [s, b, n, d] in fp32, fp16 or bf16 on a GPU, turned in fp32 by the table's angles."""
    cos, sin = (table.float().contiguous() for table in (cos, sin))
    return apply(_Rotary, x, cos, sin, partial(_turned_on_gpu, kernels or cuda_kernels()))


def apply_rotary_fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, n, d] rotated by the table's angles."""
    return apply(_Rotary, x, cos, sin, _turned_in_chunks)


def _call(positions: Tensor, dim: int) -> Callable[..., Tensor]:
    def call(f: Callable[..., Tensor], x: Tensor) -> Tensor:
        table = rotary_table(positions.to(x.device), dim, 1e4)
        return f(x, *(part.to(torch.promote_types(part.dtype, x.dtype)) for part in table))

    return call


def _examples() -> Iterator[Example]:
    # In fp64 no kernel runs, whatever the table's dtype.
    own = {"table": torch.float32}
    for s, b, n, d, dim in ((5, 2, 3, 8, 8), (3, 1, 1, 6, 4), (129, 2, 5, 34, 34), (1, 1, 1, 2, 2)):
        for positions in (torch.arange(s) + 1000, torch.arange(s * b).view(s, b) * 37):
            label = f"{(s, b, n, d)} {dim=} positions {tuple(positions.shape)}"
            yield Example(label, ((s, b, n, d),), _call(positions, dim), own=own)

    s, b, n, d = shape = (48, 2, 8, 128)

    def moves(dtype: torch.dtype) -> dict[str, int]:
        """x and y, forward and backward, and the table."""
        return {"rotary": 2 * (2 * s * b * n * d * dtype.itemsize + 2 * s * d // 2 * 4)}

    yield Example("rotary", (shape,), _call(torch.arange(s), d), traffic=Traffic(moves))


ROTARY: Operator[Callable[[Tensor, Tensor, Tensor], Tensor]] = Operator(
    "rotary",
    (
        Implementation("native_cpu", apply_rotary_native_cpu, on_native_cpu(table=torch.float32)),
        Implementation("cuda", apply_rotary_cuda, on_cuda_kernels()),
        planned(apply_rotary_cuda),
        Implementation("fused", apply_rotary_fused, where(dtypes=TRAINING_FLOATS)),
        Implementation("reference", apply_rotary_reference),
    ),
    kinds_of_calls(RotaryFacts, table=(torch.float32, torch.float64)),
    _examples,
)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x [s, b, n, d] by the angles of `rotary_table`; the rest pass through.

    This is the halves convention: channel i pairs with channel i + dim/2 (GPT-NeoX, Hugging Face's Llama).
    The table is a constant: no gradient flows to it. The rotation is computed in the table's dtype and
    returned in x's.
    """
    return ROTARY.choose(RotaryFacts.of(x, table=cos.dtype)).fn(x, cos, sin)
