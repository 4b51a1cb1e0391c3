"""Count documents that have exactly the same tokens, by a hash of 128 bits of each, in bounded memory.

The hashes go to temporary files by their first bits, so that equal ones meet in one file, and each file is
sorted by itself. A file that stays small never leaves the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from tempfile import SpooledTemporaryFile

import numpy as np

from megazero.data.indexed.reader import IndexedDataset

_RECORD = np.dtype([("hash", "<u8", 2), ("number", "<i8"), ("tokens", "<i8")])
_BUCKET = 64 << 20  # bytes of a temporary file, about
_MOST_BUCKETS = 512
_BLOCK = 1 << 16  # documents


@dataclass(frozen=True)
class Duplicates:
    """Documents that equal an earlier one.

    by_source: how many each source has, int64 [s]; tokens: theirs; groups: the number of texts that occur
    more than once; largest: the copies of the most frequent text, and `example`, the source and the number in
    it of its first copy (None without duplicates). Documents without tokens do not count.
    """

    by_source: list[int]
    tokens: int
    groups: int
    largest: int
    example: tuple[int, int] | None


def count_duplicates(datasets: Sequence[IndexedDataset]) -> Duplicates:
    """Compare all documents of several datasets. Token ids count, not the type that they are stored in."""
    sizes = [dataset.document_index.size - 1 for dataset in datasets]
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    buckets = min(_MOST_BUCKETS, -(-int(firsts[-1]) * _RECORD.itemsize // _BUCKET) or 1)
    files = [SpooledTemporaryFile(max_size=2 * _BUCKET // buckets) for _ in range(buckets)]
    try:
        for dataset, first in zip(datasets, firsts.tolist(), strict=False):
            for begin in range(0, dataset.document_index.size - 1, _BLOCK):
                records = _hashed(dataset, begin, first)
                owners = records["hash"][:, 0] % np.uint64(buckets)
                for number in np.unique(owners).tolist():
                    files[number].write(records[owners == number].tobytes())
        return _counted(files, firsts)
    finally:
        for file in files:
            file.close()


def _hashed(dataset: IndexedDataset, begin: int, first: int) -> np.ndarray:
    """Records of the documents from `begin` on that have tokens, a block of them."""
    starts = dataset.document_index[begin : begin + _BLOCK + 1]
    ends = np.append(dataset.offsets, dataset.tokens.nbytes)[starts] // dataset.dtype.itemsize
    records = np.empty(ends.size - 1, dtype=_RECORD)
    records["number"], records["tokens"] = first + begin + np.arange(ends.size - 1), np.diff(ends)
    digests = [
        hashlib.blake2b(dataset.tokens[low:high].astype("<u4").data, digest_size=16).digest()
        for low, high in pairwise(ends.tolist())
    ]
    records["hash"] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
    return records[records["tokens"] > 0]


def _counted(files: Sequence[SpooledTemporaryFile[bytes]], firsts: np.ndarray) -> Duplicates:
    by_source, tokens, groups, largest, example = np.zeros(len(firsts) - 1, dtype=np.int64), 0, 0, 1, None
    for file in files:
        file.seek(0)
        records = np.frombuffer(file.read(), dtype=_RECORD)
        order = np.lexsort((records["number"], records["hash"][:, 1], records["hash"][:, 0]))
        records = records[order]
        is_first = np.ones(len(records), dtype=bool)
        is_first[1:] = (records["hash"][1:] != records["hash"][:-1]).any(axis=1)
        copies = records[~is_first]
        sources = np.searchsorted(firsts, copies["number"], "right") - 1
        by_source += np.bincount(sources, minlength=by_source.size)
        tokens += int(copies["tokens"].sum())
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(records))
        groups += int((sizes > 1).sum())
        if sizes.size and int(sizes.max()) > largest:
            largest = int(sizes.max())
            number = int(records["number"][starts[int(sizes.argmax())]])
            source = int(np.searchsorted(firsts, number, "right")) - 1
            example = source, number - int(firsts[source])
    return Duplicates(by_source.tolist(), tokens, groups, largest if example else 0, example)
