"""Checks that index arrays from a file can be an index of this dataset.

A checksum shows that a file is as it was written, but not who wrote it. So an index from a cache is checked
before use: every number is in range, every sequence and sample occurs once per epoch, and every row of the
sample index agrees with the lengths. The checks are vectorised in blocks, which bounds memory, and take
linear time. Arrays that pass may be in another order than the seed's, but give each sample as often as they
should.

Each function returns a clause that says what is wrong, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from megazero.data.computed_order import ComputedOrder
from megazero.data.index_build import GPTIndex, SamplePlan

_BLOCK = 1 << 20  # elements of a vectorised step, few enough for temporary arrays to stay in the CPU's cache
ONE = np.int32(1)  # `np.add.at` is ten times as fast if the number has the array's type


def gpt_index_fault(
    index: GPTIndex, lengths: np.ndarray, sequence_ids: range | np.ndarray, plan: SamplePlan
) -> str | None:
    """Check a GPT index. Arguments as for `build_gpt_index`."""
    documents, samples = index.document_index, index.shuffle_index
    return (
        (None if isinstance(documents, ComputedOrder) else _document_fault(documents, sequence_ids, plan))
        or _sample_fault(index.sample_index, documents, lengths, plan)
        or (None if isinstance(samples, ComputedOrder) else _shuffle_fault(samples, plan))
    )


def blend_index_fault(
    owners: np.ndarray, samples: np.ndarray, sizes: list[int], shares: np.ndarray | None, size: int
) -> str | None:
    """Check the index of a blend.

    owners, samples: the arrays of `build_blending_index`; sizes: the number of samples of each dataset;
    shares: the share of each dataset, float64 [d] of sum 1, None if each gives every sample once; size: the
    number of samples of the blend.
    """
    for name, array in (("dataset_index", owners), ("sample_index", samples)):
        if (fault := _shape_fault(name, array, (size,))) is not None:
            return fault
    taken = np.zeros(len(sizes), dtype=np.int64)
    for block in blocks(size):
        part = owners[block]
        if (fault := _range_fault("dataset_index", part, len(sizes))) is not None:
            return fault
        # Sorted by dataset, the samples of each must continue where the block before stopped.
        order = np.argsort(part, kind="stable")
        counts = np.bincount(part, minlength=len(sizes))
        first = np.repeat(taken - (np.cumsum(counts) - counts), counts)
        if not np.array_equal(samples[block][order], first + np.arange(part.size)):
            return "sample_index does not count the samples of each dataset up from 0"
        taken += counts
    if shares is None and taken.tolist() != sizes:
        return "dataset_index does not give each sample of each dataset once"
    # The dataset that lags most comes next, so no dataset leads by more than 1 or lags by more than d.
    if shares is not None and (np.abs(taken - np.asarray(shares) * size) > len(sizes)).any():
        return "dataset_index does not keep the weights"
    return None


def _document_fault(index: np.ndarray, sequence_ids: range | np.ndarray, plan: SamplePlan) -> str | None:
    """Check that each separately shuffled part has every sequence once per epoch."""
    count = len(sequence_ids)
    if (fault := _shape_fault("document_index", index, (plan.epochs * count,))) is not None:
        return fault
    if isinstance(sequence_ids, range):
        low, size, once = sequence_ids.start, count, np.ones(1, dtype=np.int32)
    else:
        low = int(sequence_ids.min())
        once = np.bincount(sequence_ids - low).astype(np.int32)
        size = once.size
    begin = 0
    for repeats in (plan.epochs - 1, 1) if plan.separate_last else (plan.epochs,):
        part = index[begin : begin + repeats * count]
        begin += repeats * count
        times = np.zeros(size, dtype=np.int32)
        for block in blocks(part.size):
            numbers = part[block].astype(np.int64) - low
            if (fault := _range_fault("document_index", numbers, size)) is not None:
                return fault
            np.add.at(times, numbers, ONE)
        if (times != repeats * once).any():
            return "document_index does not have each sequence once per epoch"
    return None


def _sample_fault(
    rows: np.ndarray, documents: np.ndarray | ComputedOrder, lengths: np.ndarray, plan: SamplePlan
) -> str | None:
    """Check that row k points at token k * T, in the sequence with the last token of sample k - 1."""
    if (fault := _shape_fault("sample_index", rows, (plan.samples + 1, 2))) is not None:
        return fault
    positions = rows[:, 0]
    for block in blocks(plan.samples):
        part = positions[block.start : block.stop + 1]
        if (part[1:] < part[:-1]).any():
            return "sample_index goes back"
    if int(positions[0]) != 0 or int(positions[-1]) >= documents.size:
        return "sample_index leaves the documents"
    total, number = 0, 0
    for block in blocks(documents.size):
        sizes = lengths[documents[block]].astype(np.int64)
        ends = np.cumsum(sizes) + total
        total = int(ends[-1])
        after = int(np.searchsorted(positions, block.stop))
        for inner in blocks(after - number):
            here = slice(number + inner.start, number + inner.stop)
            places = positions[here] - block.start
            offsets = rows[here, 1].astype(np.int64)
            first = np.arange(here.start, here.stop, dtype=np.int64) * plan.sequence_length
            right = ends[places] - sizes[places] + offsets == first
            if not (right & (offsets >= 0) & (ends[places] >= first + plan.extra)).all():
                return "sample_index does not fit the lengths of the documents"
        number = after
    return None


def _shuffle_fault(index: np.ndarray, plan: SamplePlan) -> str | None:
    """Check that each separately shuffled part is a permutation of its sample numbers."""
    if (fault := _shape_fault("shuffle_index", index, (plan.samples,))) is not None:
        return fault
    bounds = [0, plan.samples_before_last, plan.samples] if plan.separate_last else [0, plan.samples]
    seen = np.zeros(plan.samples, dtype=bool)
    for begin, end in pairwise(bounds):
        for block in blocks(end - begin):
            part = index[begin + block.start : begin + block.stop]
            if int(part.min()) < begin or int(part.max()) >= end:
                return f"shuffle_index must be in {begin}..{end - 1}, but is not"
            seen[part] = True
    return None if seen.all() else "shuffle_index does not have each sample once"


def _shape_fault(name: str, array: np.ndarray, shape: tuple[int, ...]) -> str | None:
    if array.dtype.kind in "iu" and array.shape == shape:
        return None
    return f"{name} must be integers {list(shape)}, but is {array.dtype} {list(array.shape)}"


def _range_fault(name: str, numbers: np.ndarray, count: int) -> str | None:
    low, high = int(numbers.min()), int(numbers.max())
    return None if low >= 0 and high < count else f"{name} is out of range"


def blocks(size: int) -> Iterator[slice]:
    """Consecutive slices that cover 0..size-1."""
    return (slice(begin, min(begin + _BLOCK, size)) for begin in range(0, size, _BLOCK))
