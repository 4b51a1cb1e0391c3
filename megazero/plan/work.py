"""The work of a planned rank: kernels, calls between ranks, and waits, in the order of their start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.account.profilers.calls import CollectiveCall


@dataclass(frozen=True)
class Kernel:
    """A kernel of megazero, or an operator of torch.

    Attributes:
        name: torch's name of an operator (``mm``, ``add``), or a kernel's name (``layer_norm_forward``).
        nbytes: bytes read and written, each tensor counted once.
        flops: two for each multiply-add of matrix products, none for other arithmetic.
        dtype: the dtype of the factors of a product, or of the largest tensor.
        sizes: (m, n, k) of a matrix product of [m, k] and [k, n]; None for others.
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
    """A wait for an asynchronous call; `call` is the call's number."""

    call: int


Task = Kernel | CollectiveCall | Wait
