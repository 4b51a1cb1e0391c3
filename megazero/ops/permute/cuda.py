"""The permutation by the kernels of csrc/permute/cuda.cu."""

from __future__ import annotations

from torch import Tensor

from megazero.kernels import KernelLibrary


def permuted_by_kernel(
    x: Tensor, slots: Tensor, choice: Tensor, whole: bool, *, kernels: KernelLibrary
) -> Tensor:
    """The rows [m, h] of contiguous x [n, h]; a number that no row has stands for none."""
    (n, h), k, m = x.shape, slots.shape[1], len(choice)
    out = x.new_empty(m, h)
    kernels.launch("permute", n, h * x.element_size(), m, k, int(whole), x, slots, choice, out)
    return out
