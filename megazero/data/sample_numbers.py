"""The check of sample numbers, before anything is read for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sample_numbers(indices: Sequence[int] | np.ndarray, count: int, where: str) -> np.ndarray:
    """`indices` as int64 [n]. Raises IndexError unless they are in 0..count-1; `where` says of what."""
    numbers = np.asarray(indices, dtype=np.int64)
    if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < count):
        raise IndexError(
            f"`index` must be in 0..{count - 1} of {where}, but spans "
            f"{int(numbers.min())}..{int(numbers.max())}."
        )
    return numbers
