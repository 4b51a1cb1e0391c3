"""`Fingerprints`: 64 bits of a tensor's content, computed on its device without a wait."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

_ROW = 1 << 17  # words, each of which has a factor of its own
_WORD = 8  # bytes
_STEP = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele et al. 2014); odd
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class Fingerprints:
    """Sums of a tensor's 8-byte words, as integers, each times an odd number of its own, modulo 2^64.

    Integers add up to the same sum in any order. As odd numbers have inverses, no change of a single word
    leaves the sum as it is; other changes do with a chance of about 2^-64 per pair. Nothing here withstands
    an adversary.

    Args:
        device: the device of the tensors.
        rows: how many times 1 MiB are worked on at once, which does not change a fingerprint; by default 1
            on a CPU, and 64 on a GPU.
    """

    def __init__(self, device: torch.device | str = "cpu", rows: int | None = None):
        self._rows = rows or rows_at_once(torch.device(device))
        numbers = np.arange(1, _ROW + 1, dtype=np.uint64) * np.uint64(_STEP)
        numbers ^= numbers >> np.uint64(29)
        numbers |= np.uint64(1)
        self._factors = torch.from_numpy(numbers.view(np.int64)).to(device)
        self._powers = torch.tensor([_power(n) for n in reversed(range(self._rows))], device=device)

    def of(self, tensor: Tensor) -> Tensor:
        """The fingerprint of a contiguous tensor: int64 [], on its device.

        Tensors of other dtypes or lengths may have the same one; shapes do not matter.
        """
        flat = tensor.reshape(-1)
        size = flat.element_size()
        whole = flat.numel() * size // _WORD * _WORD // size  # elements that fill words
        # Words are read where they are if they begin at a multiple of their size.
        head = flat[:whole] if flat.storage_offset() * size % _WORD == 0 else flat[:whole].clone()
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for bits in (head.view(torch.int64), flat[whole:].view(_INTEGERS[size])):
            for piece in bits.split(self._rows * _ROW):
                count = piece.numel() // _ROW
                rows, rest = piece[: count * _ROW].view(count, _ROW), piece[count * _ROW :]
                # The sum so far is multiplied too, so that rows do not commute.
                if count:
                    sums = (rows * self._factors).sum(1)
                    total = total * _power(count) + (sums * self._powers[-count:]).sum()
                if rest.numel() or not count:
                    total = total * _power(1) + (rest * self._factors[: rest.numel()]).sum()
        return total


def rows_at_once(device: torch.device) -> int:
    """How many times 1 MiB: what stays in a core's cache, or few launches for a GPU."""
    return 64 if device.type == "cuda" else 1


def _power(n: int) -> int:
    """A power of `_STEP`, modulo 2^64, as a signed number."""
    bits = pow(_STEP, n, 1 << 64)
    return bits - (bits >> 63 << 64)
