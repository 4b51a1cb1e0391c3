"""Checks that sample numbers and token ids lie in their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megazero.errors import DataError

_TEXTS = ("tokens", "labels")


def check_sample_numbers(indices: Sequence[int] | np.ndarray, count: int, where: str) -> np.ndarray:
    """`indices` as int64 [n]; IndexError unless all are in 0..count-1. `where` names the dataset."""
    numbers = np.asarray(indices, dtype=np.int64)
    if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < count):
        raise IndexError(
            f"`index` must be in 0..{count - 1} of {where}, but spans "
            f"{int(numbers.min())}..{int(numbers.max())}."
        )
    return numbers


def check_token_ids(arrays: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Raise DataError for an id in `tokens` or `labels`, ints of any shape, outside [0, vocab_size).

    Batches are checked on the host, as a check on a device would have to wait for the device.
    """
    for name in _TEXTS:
        ids = arrays.get(name)
        if ids is None or not ids.size or (ids.min() >= 0 and ids.max() < vocab_size):
            continue
        at = tuple(np.argwhere((ids < 0) | (ids >= vocab_size))[0].tolist())
        raise DataError(
            f"`{name}` must be in [0, {vocab_size}), but is {int(ids[at])} at {list(at)} of "
            f"{list(ids.shape)}; check that the dataset was made with this model's tokenizer."
        )
