"""LAMB's two passes with bf16 gradients and bf16 weights, over the parameters of a bucket in one launch each.

The pieces lie in a bucket one behind the other, so most begin within a pack and end within another. What must
move is a piece's state, once in each pass, and its norms and rate; the sums of chunks count only where they
are all that a kernel reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.lamb import LambMoments, LambTerms, move_cuda, norms_cuda

# Biases and norms, matrices, and one of several chunks of 16,384, of which the last is small.
SIZES = (*(768, 1003, 250, 2049) * 10, 3 << 14)
_ELEMENTS = sum(SIZES)


def _chunks() -> int:
    """Chunks of all pieces; a piece that begins within a pack of 4 starts its first chunk there."""
    begins = [sum(SIZES[:number]) for number in range(len(SIZES))]
    return sum(-(-(size + begin % 4) // (1 << 14)) for size, begin in zip(SIZES, begins, strict=True))


def _cut(flat: Tensor) -> list[Tensor]:
    return list(flat.split(SIZES))


def _lamb(kernels: KernelLibrary) -> None:
    p, m, v = (_cut(torch.rand(_ELEMENTS)) for _ in range(3))
    grads, weights = (_cut(torch.rand(_ELEMENTS).bfloat16()) for _ in range(2))
    rates = torch.full((len(SIZES),), 1e-3).unbind()
    terms = LambTerms(1.0, 1e-6, 0.1)
    norms_cuda(p, grads, m, v, LambMoments(0.9, 0.95), terms, kernels=kernels)
    move_cuda(p, m, v, rates, weights, terms, kernels=kernels)


CASES = (
    KernelCase(
        "lamb bf16",
        _lamb,
        {
            "lamb_moments": (4 + 2 + 2 * 8) * _ELEMENTS,
            "lamb_sums": 16 * (_chunks() + len(SIZES)),
            "lamb_move": (8 + 2 * 4 + 2) * _ELEMENTS + 4 * len(SIZES),
        },
    ),
)
