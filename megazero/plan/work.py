"""The work of a rank on paper: kernels, calls between ranks and waits, in the order in which they start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.account.profilers.calls import Call


@dataclass(frozen=True)
class Kernel:
    """A kernel, or an operator of torch's that is one.

    Attributes:
        name: torch's for an operator (``mm``, ``add``), or that of a kernel here (``layer_norm_forward``).
        nbytes: bytes that it reads and writes, each tensor counted once.
        flops: two for each multiply-add of matrix products, none for other arithmetic.
        dtype: of what it multiplies, or of its largest tensor.
        sizes: (m, n, k) of the product of [m, k] and [k, n], for a matrix product.
        batch: the number of such products.
    """

    name: str
    nbytes: int
    flops: float = 0
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int, int] | None = None
    batch: int = 1


@dataclass(frozen=True)
class Wait:
    """The caller waits here for a call that it went on from.

    Attributes:
        call: the number of the call.
    """

    call: int


Task = Kernel | Call | Wait
