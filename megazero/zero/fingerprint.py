"""`Fingerprints`: 64 bits of a tensor's content, computed on its device without a wait."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 17  # words at a time, which bounds the memory for products
_WORD = 8  # bytes
_STEP = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele et al. 2014); odd
_MIX = _STEP - (1 << 64)  # the same bits as a signed number
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class Fingerprints:
    """Sums of a tensor's 8-byte words, as integers, each times an odd number of its own, modulo 2^64.

    Integers add up to the same sum in any order. As odd numbers have inverses, no change of a single word
    leaves the sum as it is; other changes do with a chance of about 2^-64 per pair. Nothing here withstands
    an adversary.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        numbers = np.arange(1, _CHUNK + 1, dtype=np.uint64) * np.uint64(_STEP)
        numbers ^= numbers >> np.uint64(29)
        numbers |= np.uint64(1)
        self._factors = torch.from_numpy(numbers.view(np.int64)).to(device)

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
            for chunk in bits.split(_CHUNK):
                # The sum so far is multiplied too, so that chunks do not commute.
                total = total * _MIX + (chunk * self._factors[: chunk.numel()]).sum()
        return total
