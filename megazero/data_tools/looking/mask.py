"""The loss mask of a dataset: `PREFIX.mask`, a byte for each token of the `.bin`, 1 where it carries loss."""

from __future__ import annotations

import numpy as np

from megazero.data.indexed.reader import IndexedDataset, map_file, prefix_path
from megazero.errors import DataError


def loss_mask(dataset: IndexedDataset) -> np.ndarray | None:
    """The mask, uint8 [total_tokens]; None if there is no file. Raises DataError for one of another size."""
    path = prefix_path(dataset.prefix, ".mask")
    if not path.exists():
        return None
    mask = map_file(path)
    if mask.size != dataset.total_tokens:
        raise DataError(
            f"`{path}` must hold a byte for each of the {dataset.total_tokens:,} tokens, but is {mask.size:,} "
            "bytes; make the dataset again."
        )
    return mask
