"""Best-fit packing: literal packings, the plain algorithm, and what is looked at in a cache."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megazero.data.packed.packing import Packing, PackingFacts, best_fit_decreasing, pack, packing_fault
from tests.tables import over_table


def contents(packing: Packing, lengths: np.ndarray, length: int) -> list[list[tuple[int, int, int]]]:
    """(document, offset, tokens) of the pieces of each sequence."""
    sizes = np.minimum(lengths[packing.documents] - packing.offsets, length)
    pieces = list(zip(packing.documents.tolist(), packing.offsets.tolist(), sizes.tolist(), strict=True))
    firsts = packing.firsts.tolist()
    return [pieces[begin:end] for begin, end in pairwise(firsts)]


def plainly(sizes: list[int], capacity: int) -> list[int]:
    """The room that is left in each bin, sorted: best-fit decreasing as it is defined, one item at a time."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [bin for bin, room in enumerate(rooms) if room >= size]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda bin: rooms[bin])] -= size
    return sorted(rooms)


@over_table(
    ("sizes", "capacity", "bins"),
    [
        ([8], 8, [0]),
        ([6, 4, 4, 2], 8, [0, 1, 1, 0]),
        ([5, 4, 3, 3, 1], 8, [0, 1, 0, 1, 1]),  # the last goes where the least room is left, and fits
        ([7, 6, 2, 1, 1], 8, [0, 1, 1, 0, 2]),
        ([3, 3, 3, 3, 3], 8, [0, 0, 1, 1, 2]),
        ([1, 1, 1], 1, [0, 1, 2]),
        ([], 8, []),
    ],
)
def test_bins_drawn_by_hand(sizes, capacity, bins):
    assert best_fit_decreasing(np.array(sizes, dtype=np.int64), capacity).tolist() == bins


@over_table("seed", range(60))
def test_it_is_best_fit_decreasing(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 60))
    sizes = np.sort(rng.integers(1, capacity + 1, int(rng.integers(1, 150))))[::-1]
    used = np.bincount(best_fit_decreasing(sizes, capacity), sizes)
    assert sorted((capacity - used).tolist()) == plainly(sizes.tolist(), capacity)


def test_a_packing_drawn_by_hand():
    """Document 1 is longer than a sequence of 8: it fills one, and the rest goes to documents 0 and 4."""
    lengths = np.array([4, 11, 8, 0, 1], dtype=np.int32)
    packing = pack(lengths, np.arange(5), 8, seed=1)
    found = {tuple(sorted(pieces)) for pieces in contents(packing, lengths, 8)}
    assert found == {((1, 0, 8),), ((2, 0, 8),), ((0, 0, 4), (1, 8, 3), (4, 0, 1))}
    facts = PackingFacts.of(lengths, 8, packing.sequences)
    assert facts == PackingFacts(documents=4, cut=1, tokens=24, sequences=3, padding=0)


@over_table("seed", range(20))
def test_every_token_is_there_once_and_no_document_is_cut_that_fits(seed):
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 50))
    lengths = rng.integers(0, 4 * length, 80).astype(np.int32)
    ids = rng.permutation(80)[:50]
    packing = pack(lengths, ids, length, seed)
    sequences = contents(packing, lengths, length)
    assert max(sum(size for *_, size in pieces) for pieces in sequences) <= length
    pieces = [piece for sequence in sequences for piece in sequence]
    tokens = sorted((document, offset + i) for document, offset, size in pieces for i in range(size))
    assert tokens == sorted((int(i), k) for i in ids for k in range(lengths[i]))
    cut = {document for document, offset, _ in pieces if offset}
    assert cut == set(ids[lengths[ids] > length].tolist())


def test_little_is_wasted_and_few_are_cut_beside_documents_laid_end_to_end():
    """Ding et al. on lengths like those of web text: hardly any padding, and a fraction of the cuts."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.0, 1.2, 20_000).astype(np.int32) + 1, 10**6)
    ends = np.cumsum(lengths, dtype=np.int64)
    cut_end_to_end = int(((ends - 1) // 2048 != (ends - lengths) // 2048).sum())
    facts = PackingFacts.of(lengths, 2048, pack(lengths, np.arange(20_000), 2048, 1).sequences)
    assert facts.padding_share < 0.001
    assert facts.cut == int((lengths > 2048).sum()) < 0.4 * cut_end_to_end


def test_the_seed_decides_who_goes_together():
    lengths = np.full(40, 3, dtype=np.int32)
    first, again, other = (pack(lengths, np.arange(40), 9, seed) for seed in (1, 1, 2))
    assert first.documents.tolist() == again.documents.tolist() != other.documents.tolist()


def test_a_million_documents_take_as_many_steps_as_there_are_lengths(monkeypatch):
    """Time that does not show on a busy machine: steps of the loop, each of which handles all equal bins."""
    from megazero.data.packed import packing

    steps = 0
    take = packing._OpenBins.take

    def counted(self, size, items):
        nonlocal steps
        steps += 1
        return take(self, size, items)

    monkeypatch.setattr(packing._OpenBins, "take", counted)
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000).astype(np.int32)
    best_fit_decreasing(np.sort(lengths)[::-1], 2048)
    assert steps < 50_000


FAULTS = {
    "real numbers": ("offsets", lambda a: a.astype(np.float64), "must be integers"),
    "a document of another split": ("documents", lambda a: np.where(a == 1, 5, a), "out of range"),
    "a negative document": ("documents", lambda a: np.where(a == 1, -1, a), "out of range"),
    "a negative offset": ("offsets", lambda a: np.where(a == 8, -8, a), "out of range"),
    "an offset past the end": ("offsets", lambda a: np.where(a == 8, 16, a), "out of range"),
    "an offset between": ("offsets", lambda a: np.where(a == 8, 7, a), "not a multiple"),
    "a piece twice": ("offsets", lambda a: np.where(a == 8, 0, a), "each piece once"),
    "too few pieces": ("firsts", lambda a: a[:-1], "does not cover"),
    "an empty sequence": ("firsts", lambda a: np.append(a, a[-1]), "leaves a sequence empty"),
    "two sequences in one": ("firsts", lambda a: np.delete(a, 1), "more tokens than it has room for"),
}


@over_table("fault", FAULTS)
def test_arrays_that_cannot_be_a_packing(fault):
    lengths, ids = np.array([4, 11, 8, 2, 1, 3], dtype=np.int32), np.arange(5)
    arrays = dict(vars(pack(lengths, ids, 8, 1)))
    assert packing_fault(arrays, lengths, ids, 8) is None
    name, change, reason = FAULTS[fault]
    arrays[name] = change(arrays[name])
    assert reason in packing_fault(arrays, lengths, ids, 8)
