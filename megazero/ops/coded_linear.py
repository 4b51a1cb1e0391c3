"""Products with weights of integer codes, which stay codes in memory.

Weights alone have codes (W8, W4), or inputs are rounded to 8 bits too, token by token (W8A8). The product
with weights alone is that with the weight's numbers, code times scale; the compiled kernels make them in
registers, and add in the order of `csrc/linear`, so that a row's bits do not depend on other rows, and are
those of its product with the dequantized weight. Sums of products of codes are exact integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.example import Example
from megazero.ops.native import NATIVE, NATIVE_DTYPES, address, available

PANEL = 16
"""Outputs whose codes lie together."""
WORD = 32
"""Bits of a word of codes."""
MOST_INPUTS = 1 << 16
"""Inputs whose products of codes a sum of 32 bits surely holds."""


@dataclass(frozen=True)
class CodedWeight:
    """A weight [width, depth] of codes: a code times its group's scale is a number.

    Attributes:
        words: int32 [ceil(width / 16), depth bits / 32, 16], codes of neighbours in a row, the first lowest.
        scales: fp32 [ceil(width / 16), groups, 16].
        width: outputs.
        depth: inputs.
        bits: bits of a code, 4 or 8.
        rounds_inputs: whether inputs are rounded to codes of 8 bits, a token's with a scale of its own.
    """

    words: Tensor
    scales: Tensor
    width: int
    depth: int
    bits: int
    rounds_inputs: bool = False

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, bits: int, rounds_inputs: bool = False) -> CodedWeight:
        """The weight with these codes int8 [width, depth] and scales [width, groups].

        Codes of 4 bits whose groups are no multiples of 8 are stored in 8.

        Raises:
            ValueError: scales do not fit codes, groups are no multiples of 4, or inputs that are to be
                rounded have several scales or are too many.
        """
        (width, depth), groups = codes.shape, scales.shape[1]
        if len(scales) != width or groups < 1 or depth % groups:
            raise ValueError(
                f"`scales` must be one for each group of a row of {width} rows of {depth} codes, but are "
                f"{list(scales.shape)}; give as many"
            )
        group = depth // groups
        if groups > 1 and group % 4:
            raise ValueError(f"`group` must be a multiple of 4, but is {group}; dequantize the weight")
        if rounds_inputs and (groups > 1 or bits != 8 or depth > MOST_INPUTS):
            raise ValueError(
                "codes of rounded inputs must meet a weight of 8 bits, of one scale for a row and at most "
                f"{MOST_INPUTS} inputs, but one of {bits} bits, {groups} scales and {depth} inputs; "
                "dequantize the weight"
            )
        bits = bits if groups == 1 or group % 8 == 0 else 8
        run, panels = WORD // bits, -(-width // PANEL)
        filled = F.pad(codes, (0, -depth % run, 0, panels * PANEL - width)).view(panels, PANEL, -1, run)
        words = torch.zeros(filled.shape[:-1], dtype=torch.int32, device=codes.device)
        for place in range(run):  # one place after another, since all as words at once take much memory
            words |= (filled[..., place].int() & ((1 << bits) - 1)) << bits * place
        return cls(
            words.transpose(1, 2).contiguous(),
            F.pad(scales.float(), (0, 0, 0, panels * PANEL - width))
            .view(panels, PANEL, groups)
            .transpose(1, 2)
            .contiguous(),
            width,
            depth,
            bits,
            rounds_inputs,
        )

    @cached_property
    def for_kernels(self) -> tuple[int, int, int, int]:
        """Padded inputs, inputs that share a scale, and the addresses of words and scales."""
        depth = self.words.shape[1] * (WORD // self.bits)
        return depth, depth // self.scales.shape[1], address(self.words), address(self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.words.nbytes + self.scales.nbytes

    @property
    def codes(self) -> Tensor:
        """The codes, int8 [width, depth]."""
        shifts = torch.arange(WORD // self.bits, device=self.words.device) * self.bits
        raised = self.words.unsqueeze(-1) << (WORD - self.bits - shifts).int() >> WORD - self.bits
        return raised.to(torch.int8).transpose(1, 2).flatten(2).flatten(0, 1)[: self.width, : self.depth]

    @property
    def row_scales(self) -> Tensor:
        """The scales, fp32 [width, groups]."""
        return self.scales.transpose(1, 2).flatten(0, 1)[: self.width]

    def dequantized(self) -> Tensor:
        """The numbers, fp32 [width, depth]."""
        scales = self.row_scales
        grouped = self.codes.float().view(self.width, scales.shape[1], -1)
        return (grouped * scales.unsqueeze(2)).flatten(1)


def rounded(x: Tensor, greatest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows x [rows, n] as integers from -128 to 127, in x's dtype, and their scales [rows, 1].

    The code of x is x / scale, rounded to even. Rows that are not finite have the scale NaN.
    """
    most = x.abs().amax(1) if greatest is None else greatest.to(x.dtype)
    scales = torch.where(most > 0, most / 127.5, torch.ones_like(most)).unsqueeze(1)
    codes = (x / scales).round().clamp(-128, 127)
    return codes.nan_to_num(0.0), scales.where(most.isfinite().unsqueeze(1), torch.nan)


def coded_linear_reference(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, greatest: Tensor | None = None
) -> Tensor:
    """``x w^T + bias`` with ``w = code * scale``, and x rounded first if the weight says so."""
    wide = x if x.dtype == torch.float64 else x.float()
    if weight.rounds_inputs:
        codes, scales = rounded(wide, greatest)
        sums = codes.double() @ weight.codes.double().t()
        y = (sums * (scales.double() * weight.row_scales.double().t())).to(wide.dtype)
        return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)
    bias = None if bias is None else bias.to(wide.dtype)
    return F.linear(wide, weight.dequantized().to(wide.dtype), bias).to(x.dtype)


def coded_linear_torch(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, greatest: Tensor | None = None
) -> Tensor:
    """torch's products: of the weight's numbers in x's dtype, or of integers, of 17 rows at least."""
    if not weight.rounds_inputs:
        return F.linear(x, weight.dequantized().to(x.dtype), bias)
    codes, scales = rounded(x.float(), greatest)
    rows, run = len(x), 8  # sizes that cuBLAS takes
    few = F.pad(codes.to(torch.int8), (0, -weight.depth % run, 0, max(17 - rows, 0)))
    matrix = F.pad(weight.codes, (0, -weight.depth % run, 0, -weight.width % run))
    sums = torch._int_mm(few, matrix.t())[:rows, : weight.width]
    y = sums.float() * (scales * weight.row_scales.t())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def coded_linear_native_cpu(
    x: Tensor,
    weight: CodedWeight,
    bias: Tensor | None,
    greatest: Tensor | None = None,
    most: NATIVE.CodedPath | None = None,
) -> Tensor:
    """The compiled kernels of csrc/coded_linear; `most` is the most that they use of the processor."""
    depth, group, *codes = weight.for_kernels
    wide = _plain(x) if depth == weight.depth else F.pad(x.float(), (0, depth - weight.depth))
    bias, greatest = (None if vector is None else _plain(vector) for vector in (bias, greatest))
    y = torch.empty(x.shape[0], weight.width)
    sizes, ends = (x.shape[0], weight.width, depth), (address(bias), y.data_ptr())
    path, threads = most or NATIVE.CodedPath.AVX512_VNNI, torch.get_num_threads()
    if weight.rounds_inputs:
        NATIVE.integer_linear(*sizes, threads, address(wide), address(greatest), *codes, *ends, path)
    else:
        NATIVE.coded_linear(*sizes, group, weight.bits, threads, wide.data_ptr(), *codes, *ends, path)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def _plain(x: Tensor) -> Tensor:
    """x in contiguous fp32; calls of torch that change nothing would take as long as a small product."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


def _examples() -> Iterator[Example]:
    for rows, depth, groups, bits in ((1, 64, 2, 4), (3, 20, 1, 8), (70, 128, 1, 8), (65, 416, 13, 4)):
        for bias in (False, True):
            biases: tuple[tuple[int, ...], ...] = ((37,),) if bias else ()
            label = f"{rows} rows, {bits} bits, {groups} groups{', bias' if bias else ''}"
            yield Example(label, ((rows, depth), (37, depth), *biases), partial(_example, groups, bits))


def _example(groups: int, bits: int, f: Callable[..., Tensor], x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
    most = (1 << bits - 1) - 1
    codes = (w.double() * most / 3).round().clamp(-most - 1, most).to(torch.int8)
    scales = w.float().view(len(w), groups, -1)[..., 0].abs() / most + 0.01
    return f(x, CodedWeight.of(codes, scales, bits), bias[0] if bias else None)


Product = Callable[[Tensor, CodedWeight, "Tensor | None", "Tensor | None"], Tensor]

CODED_LINEAR: Operator[Product] = Operator(
    "coded_linear",
    (
        Implementation("native_cpu", coded_linear_native_cpu, where(CPU, NATIVE_DTYPES, available)),
        Implementation("torch", coded_linear_torch, where(CUDA)),
        Implementation("reference", coded_linear_reference),
    ),
    kinds_of_calls(),
    _examples,
    differentiable=False,
)


def coded_linear(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, greatest: Tensor | None = None
) -> Tensor:
    """x [..., depth] times the weight, plus bias [width], in x's dtype: [..., width]; it has no backward.

    Sums are of fp32, or of integers.

    Args:
        greatest: [...], the largest magnitude of each row by which inputs are rounded; None for that of x.
            Where rows are sliced over ranks, it is that of whole rows.
    """
    rows, most = x.reshape(-1, weight.depth), None if greatest is None else greatest.reshape(-1)
    y = CODED_LINEAR.choose(CallFacts.of(x)).fn(rows, weight, bias, most)
    return y.view(*x.shape[:-1], weight.width)
