"""`prefix.mask`, beside a `.bin`: a byte for each token, 1 if it counts in the loss as a label, else 0.

The loss of a position is that of its label, the next token; so position t has the mask of token t + 1. In a
dataset without this file every token counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from megazero.data.files import flush
from megazero.data.indexed import checksum
from megazero.data.indexed.checksum import BlockChecksum, Sidecar
from megazero.errors import DataError

_PIECE = 4 << 20


def check_mask(path: Path, mask: np.ndarray | None, sidecar: Sidecar | None, tokens: int) -> None:
    """Raise DataError unless the `.mask` at `path` has a byte for each token, and agrees with the sidecar.

    mask: the bytes of the file, None if it is not there; sidecar: the dataset's, if it has one.
    """
    recorded = None if sidecar is None else sidecar.mask_blocks
    if sidecar is not None and (mask is None) != (recorded is None):
        state = "has none" if mask is not None else "has them, and the file is not there"
        raise DataError(
            f"`{path}` must have checksums in the .sum beside it, but that {state}; copy all files of the "
            "dataset, or delete the .sum and write it anew: megazero data inspect PREFIX --write-sums"
        )
    blocks = -(-tokens // checksum.BLOCK)
    if mask is not None and (mask.size != tokens or (recorded is not None and len(recorded) != blocks)):
        raise DataError(
            f"`{path}` must have a byte for each of the {tokens} tokens, but has {mask.size} bytes; make the "
            "dataset again, or remove its .mask and .sum to count all tokens."
        )


def check_values(path: Path, mask: np.ndarray) -> None:
    """Raise DataError unless all bytes of the `.mask` at `path` are 0 or 1."""
    if mask.size and int(mask.max()) > 1:
        raise DataError(f"`{path}` must hold 0 and 1 alone, but holds {mask.max()}; make the dataset again.")


def refuse_mask(
    prefix: str, mask: np.ndarray | None, why: str = "for BERT or T5", remedy: str = "train a GPT on it"
) -> None:
    """Raise DataError if a dataset has a mask, for samples that choose themselves what counts in the loss."""
    if mask is not None:
        raise DataError(f"`{prefix}` must have no .mask {why}, but has one; {remedy}.")


def label_mask(mask: np.ndarray, begins: np.ndarray, ends: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Which labels of a batch count: bool [b, T], of this shape.

    begins, ends: the pieces of text that the samples consist of, in order, by tokens, int64 [n] each; a
    sample is T tokens, whose last label is not known, or T + 1.
    """
    sizes = ends - begins
    tokens = np.arange(int(sizes.sum())) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    counted = np.zeros(shape, dtype=bool)
    labels = (mask[tokens] != 0).reshape(shape[0], -1)[:, 1:]
    counted[:, : labels.shape[1]] = labels
    return counted


def block_sums(data: np.ndarray) -> tuple[int, ...]:
    """The CRC-32 of each block of a contiguous array."""
    sums = BlockChecksum()
    sums.update(data)
    return tuple(sums.blocks())


class MaskWriter:
    """Writes the `.mask` of a dataset, if any of its tokens have a mask. start: opens the file, then."""

    def __init__(self, start: Callable[[], IO[bytes]]):
        self._start = start
        self._file: IO[bytes] | None = None
        self._checksum = BlockChecksum()

    def add(self, mask: np.ndarray | None, count: int, before: int) -> None:
        """Append the mask of `count` tokens, all if None, behind `before`. DataError if its size is wrong."""
        if mask is not None and mask.size != count:
            raise DataError(f"`mask` must have {count} values, one for each token, but has {mask.size}.")
        if mask is not None and self._file is None:
            self._file = self._start()
            self.add(None, before, 0)
        if self._file is None:
            return
        for begin in range(0, count, _PIECE):
            size = min(_PIECE, count - begin)
            part = np.ones(size, np.bool_) if mask is None else mask[begin : begin + size] != 0
            self._file.write(part.data)
            self._checksum.update(part)

    def finish(self) -> tuple[int, ...] | None:
        """Write everything to the disk; the CRC-32 of each block, None without a mask."""
        if self._file is not None:
            flush(self._file)
        return None if self._file is None else tuple(self._checksum.blocks())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
