"""Count documents that have exactly the same tokens, by a hash of 128 bits of each, in bounded memory."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from megazero.data.indexed.reader import IndexedDataset

_BLOCK = 1 << 16  # documents


def count_duplicates(datasets: Sequence[IndexedDataset]) -> dict[str, object]:
    """Compare the documents of several datasets by their ids, whatever type these are stored in.

    Returns what equals an earlier document: the `documents` of each source and their `tokens`; the number of
    `texts` that occur more than once; the copies of the most frequent one, and its first (`largest`,
    `example`). Documents without tokens do not count. The hashes lie in a temporary file of SQLite's.
    """
    base = sqlite3.connect("")
    try:
        base.execute("CREATE TABLE texts (hash BLOB, source INTEGER, number INTEGER, tokens INTEGER)")
        base.executemany("INSERT INTO texts VALUES (?, ?, ?, ?)", _hashes(datasets))
        copies = "SELECT *, row_number() OVER (PARTITION BY hash ORDER BY rowid) AS copy FROM texts"
        rows = base.execute(f"SELECT source, count(*), sum(tokens) FROM ({copies}) WHERE copy > 1 GROUP BY 1")
        later = {source: (documents, tokens) for source, documents, tokens in rows}
        columns = "count(*) AS n, min(rowid) AS at, source, number"
        groups = f"SELECT {columns} FROM texts GROUP BY hash HAVING n > 1"
        texts, largest = base.execute(f"SELECT count(*), max(n) FROM ({groups})").fetchone()
        most = f"SELECT source, number FROM ({groups}) ORDER BY n DESC, at LIMIT 1"
        first = base.execute(most).fetchone()
    finally:
        base.close()
    return {
        "documents": [later.get(source, (0, 0))[0] for source in range(len(datasets))],
        "tokens": sum(tokens for _, tokens in later.values()),
        "texts": texts,
        "largest": largest or 0,
        "example": first and [datasets[first[0]].prefix, first[1]],
    }


def _hashes(datasets: Sequence[IndexedDataset]) -> Iterator[tuple[bytes, int, int, int]]:
    for source, dataset in enumerate(datasets):
        ends = np.append(dataset.offsets // dataset.dtype.itemsize, dataset.total_tokens)
        for begin in range(0, dataset.document_index.size - 1, _BLOCK):
            borders = ends[dataset.document_index[begin : begin + _BLOCK + 1]].tolist()
            for number, (low, high) in enumerate(pairwise(borders), begin):
                if high > low:
                    ids = dataset.tokens[low:high].astype("<u4").data
                    yield hashlib.blake2b(ids, digest_size=16).digest(), source, number, high - low
