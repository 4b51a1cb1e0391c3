"""Whether a sample map that comes from a cache can be one of these documents; see `data/index_check.py`."""

from __future__ import annotations

import numpy as np

from megazero.data.bert.sample_map import LONGEST_SENTENCE, MapPlan
from megazero.data.index_check import ONE, blocks


def sample_map_fault(
    rows: np.ndarray, lengths: np.ndarray, boundaries: np.ndarray, plan: MapPlan
) -> str | None:
    """Return a clause that says what is wrong with a sample map, or None.

    In each epoch the rows of a document that is used are all its sentences, one row after the other; of other
    documents there are none. Arguments as for `build_sample_map`. Takes time and memory in proportion to the
    rows and sentences.
    """
    if rows.dtype.kind != "u" or rows.ndim != 2 or rows.shape[1] != 3:
        return f"rows must be unsigned integers [samples, 3], but are {rows.dtype} {list(rows.shape)}"
    if len(rows) < (plan.num_samples or 1):
        return f"rows must be at least {plan.num_samples or 1}, but are {len(rows)}"
    low, high = int(boundaries[0]), int(boundaries[-1])
    least = 2 if plan.short_ratio else plan.target
    begun, ended = (np.zeros(high - low + 1, dtype=np.int32) for _ in range(2))
    for block in blocks(len(rows)):
        firsts, ends, targets = (rows[block, column].astype(np.int64) for column in range(3))
        if int(firsts.min()) < low or int(ends.max()) > high or (ends <= firsts).any():
            return "rows name sentences that are not there"
        if int((ends - firsts).min()) < plan.min_sentences:
            return f"rows must have at least {plan.min_sentences} sentence(s), but one has fewer"
        if int(targets.min()) < least or int(targets.max()) > plan.target:
            return f"rows must have targets of {least}..{plan.target} tokens, but have others"
        np.add.at(begun, firsts - low, ONE)
        np.add.at(ended, ends - low, ONE)
    used = _used(lengths, boundaries, plan.min_sentences)
    starts = boundaries[:-1][used] - low
    epochs = int(begun[starts[0]])
    if plan.num_samples is None and epochs != plan.epochs:
        return f"rows must make {plan.epochs} epoch(s), but make {epochs}"
    # If as many rows begin with each document as there are rows over it, none reaches across its ends.
    sound = bool((begun[starts] == epochs).all())
    rows_over = np.cumsum(np.subtract(begun, ended, out=begun), dtype=np.int32)[:-1]
    wanted = np.repeat(np.where(used, np.int32(epochs), np.int32(0)), np.diff(boundaries))
    if not (sound and np.array_equal(rows_over, wanted)):
        return "rows must have each sentence once per epoch, but do not"
    return None


def _used(lengths: np.ndarray, boundaries: np.ndarray, min_sentences: int) -> np.ndarray:
    """A mask of the documents that give samples, bool [documents], as `count_documents` counts them."""
    sentences = np.diff(boundaries)
    low, high = int(boundaries[0]), int(boundaries[-1])
    places = low + np.flatnonzero(np.asarray(lengths[low:high]) > LONGEST_SENTENCE)
    long = np.zeros(sentences.size, dtype=bool)
    long[np.searchsorted(boundaries, places, side="right") - 1] = True
    return (sentences >= max(1, min_sentences)) & ~(long & (sentences > 1))
