"""The check of token ids where batches are made, on the host: a device would have to be waited for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megazero.errors import DataError

_TEXTS = ("tokens", "labels")


def check_token_ids(arrays: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Look at the `tokens` and `labels` among a batch's arrays, ints of any shape.

    Raises:
        DataError: one lies outside [0, vocab_size); it and its place are named.
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
