"""The choice of rows by the kernel of csrc/chosen_rows/cuda.cu."""

from __future__ import annotations

from torch import Tensor

from megazero.kernels import KernelLibrary


def copied_by_kernel(
    source: Tensor | None, numbers: Tensor, otherwise: Tensor | None, like: Tensor, kernels: KernelLibrary
) -> Tensor:
    """out [m, h] in fp32, fp16 or bf16 on a GPU: source[numbers[i]], or otherwise[i] where that is negative.

    The numbers are not checked first: a row that the source does not have comes out as NaN.
    """
    source, otherwise = (None if x is None else x.contiguous() for x in (source, otherwise))
    out = like.new_empty(len(numbers), like.shape[1])
    sizes = (len(numbers), like.shape[1] * like.element_size(), 0 if source is None else len(source))
    kernels.launch("chosen_rows", *sizes, source, numbers.contiguous(), otherwise, out)
    return out
