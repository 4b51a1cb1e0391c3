"""Whose turn it is: draws are dealt to clusters in proportion to their sizes, by counting.

Of any number of first draws each half of the clusters gets its share, rounded down for the first half, and so
on within each half down to single clusters. In as many draws as there are samples each cluster has exactly as
many turns as it has samples; in others it is off by less than the logarithm of the number of clusters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def owner(draw: int, bounds: Sequence[int]) -> tuple[int, int]:
    """(the cluster whose turn the draw is, how many turns it had before).

    bounds: cluster i holds the samples bounds[i] to bounds[i + 1] - 1, and at least one; bounds[0] is 0.
    """
    low, high = 0, len(bounds) - 1
    while high - low > 1:
        middle = (low + high) // 2
        part, whole = bounds[middle] - bounds[low], bounds[high] - bounds[low]
        first = draw * part // whole
        if (draw + 1) * part // whole > first:
            high, draw = middle, first
        else:
            low, draw = middle, draw - first
    return low, draw


def shares(draws: int, bounds: np.ndarray) -> np.ndarray:
    """How many of the first `draws` each cluster has as its turns, int64 [clusters].

    bounds: as for `owner`, int64; up to 3 * 10^9 samples.
    """
    low, high = np.array([0]), np.array([len(bounds) - 1])
    turns = np.array([draws], dtype=np.int64)
    while (high - low > 1).any():
        middle = np.where(high - low > 1, (low + high) // 2, high)
        part, whole = bounds[middle] - bounds[low], bounds[high] - bounds[low]
        # As turns * part // whole, but within 64 bits.
        first = turns // whole * part + turns % whole * part // whole
        split = middle < high
        low, high = _pairs(low, middle, split), _pairs(middle, high, split)
        turns = _pairs(first, turns - first, split)
    return turns


def _pairs(first: np.ndarray, second: np.ndarray, split: np.ndarray) -> np.ndarray:
    """Both values where a range was split, side by side; the first where it was not."""
    both = np.stack([first, second], axis=1)
    keep = np.stack([np.ones_like(split), split], axis=1)
    return both[keep]
