"""Turns: draws are dealt to clusters in proportion to their sizes, by counting.

Of any number of first draws each half of the clusters gets its share, rounded down for the first half, and so
on within each half down to single clusters. In as many draws as there are samples each cluster has exactly as
many turns as it has samples; in others it is off by less than the logarithm of the number of clusters.

Clusters are given by `bounds`, int64: cluster i holds the samples bounds[i] to bounds[i + 1] - 1, together
fewer than 3 * 10^9; bounds[0] is 0. The last ones may be empty, and have no turns: so the halves are the same
however many clusters there are already.
"""

from __future__ import annotations

import numpy as np


def owners(draws: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the cluster whose turn each draw is, how many turns it had before), int64 like `draws`."""
    low, high = np.zeros_like(draws), np.full_like(draws, len(bounds) - 1)
    while (open_ := high - low > 1).any():
        middle = np.where(open_, (low + high) // 2, high)
        part, whole = bounds[middle] - bounds[low], bounds[high] - bounds[low]
        first = _share(draws, part, whole)
        mine = _share(draws + 1, part, whole) > first  # always where there is nothing to halve
        low, high = np.where(mine, low, middle), np.where(mine, middle, high)
        draws = np.where(mine, first, draws - first)
    return low, draws


def shares(draws: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The number of turns that each cluster has among the first draws, int64 [deals, clusters].

    draws: how many of each deal, int64 [deals]. bounds: of each deal, [deals, clusters + 1].
    """
    low, high = np.array([0]), np.array([bounds.shape[1] - 1])
    turns = np.asarray(draws, dtype=np.int64)[:, None]
    while (open_ := high - low > 1).any():
        middle = np.where(open_, (low + high) // 2, high)
        first = _share(turns, bounds[:, middle] - bounds[:, low], bounds[:, high] - bounds[:, low])
        low, high = _both(low, middle, open_), _both(middle, high, open_)
        turns = _both(first, turns - first, open_)
    return turns


def _share(draws: np.ndarray, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """draws * part // whole, within 64 bits; nothing of nothing."""
    whole = np.maximum(whole, 1)
    share: np.ndarray = draws // whole * part + draws % whole * part // whole
    return share


def _both(first: np.ndarray, second: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """Both values side by side where there are two halves, else the first; along the last dim."""
    sides = np.stack([first, second], axis=-1)
    pairs: np.ndarray = sides[..., np.stack([np.ones_like(open_), open_], axis=-1)]
    return pairs
