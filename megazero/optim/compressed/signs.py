"""Signs as bits: eight numbers to a byte, in the order in which they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 8


def packed_size(numel: int) -> int:
    """Bytes that the signs of `numel` numbers take."""
    return -(-numel // _BITS)


def pack_signs(numbers: Tensor) -> Tensor:
    """The signs of each row, packed: a bit is set where a number is at least 0 (-0 included).

    Args:
        numbers: [rows, n].

    Returns:
        uint8 [rows, packed_size(n)]; the bits beyond n are 0.
    """
    rows, numel = numbers.shape
    bits = numbers.new_zeros(rows, packed_size(numel) * _BITS, dtype=torch.uint8)
    bits[:, :numel] = numbers >= 0
    bits = bits.view(rows, -1, _BITS)
    packed = bits[..., 0].clone()
    for place in range(1, _BITS):
        packed |= bits[..., place] << place
    return packed


def unpack_signs(packed: Tensor, numel: int) -> Tensor:
    """Whether each number that `pack_signs` packed was at least 0: bool [rows, numel]."""
    places = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> places) & 1
    return bits.view(packed.shape[0], -1)[:, :numel].bool()
