"""Best-fit packing: documents share sequences of one length, and only documents longer than that are cut.

If documents are laid end to end, long ones are often cut, and the model learns to continue text whose
beginning it cannot see. Here a document that fits into a sequence is never cut: the longest documents come
first, and each goes into the fullest sequence that still has room for it (best-fit decreasing; Ding et al.
2024, "Fewer truncations improve language modeling").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Pieces of documents in the order of the sequences that they share; a document that fits is one piece.

    documents: int32|int64 [p], the document of each piece; offsets: int32 [p], the piece's first token in the
    document, a multiple of the sequence length; firsts: int64 [n + 1], the first piece of each of n
    sequences, then p.
    """

    documents: np.ndarray
    offsets: np.ndarray
    firsts: np.ndarray

    @property
    def sequences(self) -> int:
        return len(self.firsts) - 1


@dataclass(frozen=True)
class PackingFacts:
    """The figures of a packing."""

    documents: int  # with at least one token
    cut: int  # documents longer than a sequence
    tokens: int
    sequences: int
    padding: int  # positions that hold no token

    @property
    def padding_share(self) -> float:
        """The share of all positions that are padding."""
        return self.padding / max(1, self.tokens + self.padding)

    @classmethod
    def of(cls, sizes: np.ndarray, sequence_length: int, sequences: int) -> PackingFacts:
        """The figures for documents of `sizes` tokens, int [n], packed into `sequences` sequences."""
        tokens = int(sizes.sum(dtype=np.int64))
        cut = int((sizes > sequence_length).sum())
        padding = sequences * sequence_length - tokens
        return cls(int((sizes > 0).sum()), cut, tokens, sequences, padding)


def pack(lengths: np.ndarray, ids: np.ndarray, sequence_length: int, seed: int) -> Packing:
    """Pack the documents `ids`, int [n], of a dataset with these `lengths`, int32 [S].

    A document longer than a sequence gives full sequences and a rest, which is packed like a document; an
    empty document gives nothing. The seed decides which documents of equal length share a sequence. Takes
    O(n log n) time.
    """
    ids = np.random.RandomState(seed).permutation(ids)
    sizes = lengths[ids].astype(np.int64)
    whole, rests = np.divmod(sizes, sequence_length)
    order = np.argsort(-rests, kind="stable")[: int((rests > 0).sum())]
    bins = best_fit_decreasing(rests[order], sequence_length)
    full = int(whole.sum())  # sequences that one document fills
    first_of_full = np.cumsum(whole) - whole
    numbers = np.concatenate([np.repeat(ids, whole), ids[order]])
    within = np.arange(full) - np.repeat(first_of_full, whole)
    offsets = np.concatenate([within, whole[order]]) * sequence_length
    sequence = np.concatenate([np.arange(full), full + bins])
    by_sequence = np.argsort(sequence, kind="stable")
    narrow = numbers.size == 0 or int(numbers.max()) <= np.iinfo(np.int32).max
    counts = np.bincount(sequence) if sequence.size else np.zeros(0, dtype=np.int64)
    return Packing(
        numbers[by_sequence].astype(np.int32 if narrow else np.int64),
        offsets[by_sequence].astype(np.int32),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign items to bins; return the bin of each item, int64 [n]. Bins are numbered as they are opened.

    Items of one size fill the bins with the least room one after another, so a step of the loop handles all
    bins of equal room, and there are at most as many steps as items.

    Args:
        sizes: int [n], from largest to smallest, in 1..capacity.
        capacity: the size of a bin.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    values, counts = np.unique(sizes, return_counts=True)
    rooms = _OpenBins(capacity)
    done = 0
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            room, chosen = rooms.take(size, end - done)
            fit = room // size  # items that fit into one of these bins
            placed = min(end - done, fit * len(chosen))
            bins[done : done + placed] = np.repeat(chosen, fit)[:placed]
            done += placed
            in_last = placed - fit * (len(chosen) - 1)
            rooms.put(room - fit * size, chosen[:-1], size)
            rooms.put(room - in_last * size, chosen[-1:], size)
    return bins


class _OpenBins:
    """Open bins by the room that is left in them. Item sizes may only decrease from call to call.

    Two heaps find the least room that suffices: one of rooms that suffice for the current size, with the
    least on top, and one of rooms that are too small as yet, with the largest on top.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._opened = 0
        self._bins: dict[int, list[np.ndarray]] = {}
        self._enough: list[int] = []
        self._too_small: list[int] = []  # negated

    def take(self, size: int, items: int) -> tuple[int, np.ndarray]:
        """Take bins for up to `items` items: the least room of at least `size`, and bins int64 [m >= 1]."""
        while self._too_small and -self._too_small[0] >= size:
            heappush(self._enough, -heappop(self._too_small))
        if not self._enough:
            new = -(-items // (self.capacity // size))
            self._opened += new
            return self.capacity, np.arange(self._opened - new, self._opened)
        room = self._enough[0]
        wanted = -(-items // (room // size))
        stack = self._bins[room]
        chosen = stack.pop()
        if len(chosen) > wanted:
            stack.append(chosen[wanted:])
        if not stack:
            del self._bins[heappop(self._enough)]
        return room, chosen[:wanted]

    def put(self, room: int, bins: np.ndarray, size: int) -> None:
        """Return bins with `room` left; `size` is the current item size."""
        if room == 0 or not len(bins):
            return
        if room not in self._bins:
            self._bins[room] = []
            if room >= size:
                heappush(self._enough, room)
            else:
                heappush(self._too_small, -room)
        self._bins[room].append(bins)


def packing_fault(
    arrays: Mapping[str, np.ndarray], lengths: np.ndarray, ids: np.ndarray, sequence_length: int
) -> str | None:
    """Return a clause saying why loaded arrays cannot be a `Packing` of these documents; None if they can."""
    documents, offsets, firsts = (arrays[name] for name in ("documents", "offsets", "firsts"))
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind != "i":
            return f"{name} must be integers [n], but is {array.dtype} {list(array.shape)}"
    if documents.size != offsets.size or not firsts.size or firsts[0] != 0 or firsts[-1] != documents.size:
        return "firsts does not cover the pieces"
    if (np.diff(firsts) < 1).any():
        return "firsts leaves a sequence empty"
    times = np.bincount(ids, minlength=len(lengths))
    pieces = np.where(times > 0, -(-lengths.astype(np.int64) // sequence_length), 0)  # of each document
    if documents.size != int((times * pieces).sum()):
        return f"there are {documents.size} pieces, and {int((times * pieces).sum())} are needed"
    if documents.size and not 0 <= int(documents.min()) <= int(documents.max()) < len(lengths):
        return "documents is out of range"
    number = offsets // sequence_length
    if not ((offsets >= 0) & (number < pieces[documents])).all():
        return "documents or offsets is out of range"
    if (number * sequence_length != offsets).any():
        return "offsets is not a multiple of the sequence length"
    seen = np.bincount((np.cumsum(pieces) - pieces)[documents] + number, minlength=int(pieces.sum()))
    if not np.array_equal(seen, np.repeat(times, pieces)):
        return "documents does not have each piece once"
    sizes = np.minimum(lengths[documents] - offsets, sequence_length).astype(np.int64)
    if (np.add.reduceat(sizes, firsts[:-1]) > sequence_length).any():
        return "a sequence holds more tokens than it has room for"
    return None
