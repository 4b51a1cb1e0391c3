"""Draws samples by a curriculum: a pure function of the seed and the position in the training.

The method is DeepSpeed's (Data Efficiency, Li et al. 2024): samples that become eligible together form a
cluster. Clusters are drawn in proportion to their sizes, and the samples of a cluster are drawn epoch after
epoch, each in a random order. DeepSpeed keeps a random generator and files of clusters as state. Here nothing
is kept: the number of earlier draws from each cluster is computed from the position, and the order of a
cluster is a keyed permutation.

A draw gives its cluster a *turn*. Turns are dealt by halving: of the first n draws the lower half of the
clusters gets its share, rounded down, and the upper half the rest, and so on within each half down to single
clusters. In as many draws as there are samples, each cluster has exactly as many turns as samples; in other
numbers of draws it is off by less than the logarithm of the number of clusters.

Clusters are given by bounds, int64: cluster i has the samples bounds[i] to bounds[i + 1] - 1, fewer than
3 * 10^9 in all; bounds[0] is 0. Clusters that are not eligible yet are empty and get no turns, so the halves
are the same in every piece of the training.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right

import numpy as np

from megazero.config.difficulties import Difficulties
from megazero.config.steps import Steps
from megazero.data.sampler import SamplerSpec
from megazero.data.shuffle import cyclic_sample
from megazero.data_efficiency.eligibility import EligibilityOrder
from megazero.errors import DataError

_BLOCK = 256  # draws that are shuffled together, so that clusters take turns in no pattern
_MOST_COUNTED = 1 << 20  # turns that are counted at once, to bound memory


class CurriculumSampler:
    """The samples of each micro-batch, with the interface of `megazero.data.sampler.BatchSampler`.

    spec: the sampler without a curriculum. order: the samples by the piece in which they become eligible.
    begins: for each piece, the samples consumed when it begins in this run. planned: the same in a training
    with these settings from the beginning; it differs only if the batch size was changed on the way. `at` is
    a function of its argument; the caches only save time.
    """

    def __init__(
        self, spec: SamplerSpec, order: EligibilityOrder, begins: tuple[int, ...], planned: tuple[int, ...]
    ):
        self.spec = spec
        self._samples = order.samples
        # A piece that adds no samples continues the piece before it.
        pieces = [k for k, end in enumerate(order.ends) if k == 0 or end > order.ends[k - 1]]
        self._begins = [begins[k] for k in pieces]
        self._planned = [planned[k] for k in pieces]
        self._bounds = np.array([0, *(order.ends[k] for k in pieces)], dtype=np.int64)
        # Each cache is a single value, so that a thread always reads an entry with its own key.
        self._turns: tuple[int, np.ndarray] = (0, np.zeros(len(pieces), dtype=np.int64))
        self._dealt: tuple[tuple[int, int], np.ndarray, np.ndarray] = ((-1, 0), np.empty(0), np.empty(0))

    @classmethod
    def of(
        cls, spec: SamplerSpec, order: EligibilityOrder, difficulties: Difficulties, steps: Steps
    ) -> CurriculumSampler:
        """The sampler of a run with `steps`."""
        return cls(
            spec, order, difficulties.first_samples(steps), difficulties.first_samples(steps.from_beginning)
        )

    def at(self, consumed_samples: int) -> np.ndarray:
        """The sample numbers of this rank's micro-batch, int64 [micro_batch_size]; safe from any thread.

        Raises DataError if the order lists a sample that the dataset does not have.
        """
        first = consumed_samples + self.spec.data_parallel_rank * self.spec.micro_batch_size
        positions = range(first, first + self.spec.micro_batch_size)
        numbers = np.array([self._sample_at(position) for position in positions], dtype=np.int64)
        if numbers.min() < 0 or numbers.max() >= self.spec.num_samples:
            raise DataError(
                f"`index_to_sample_path` must list samples of the dataset, 0..{self.spec.num_samples - 1}, "
                f"but lists {numbers.tolist()}; analyze this dataset."
            )
        return numbers

    def _sample_at(self, position: int) -> int:
        """The sample at a position of the training."""
        piece = max(0, bisect_right(self._begins, position) - 1)
        draw = position - self._planned[piece]
        begin, end = self._block(piece, draw)
        clusters, turns = self._deal(piece, begin, end)
        cluster, turn = int(clusters[draw - begin]), int(turns[draw - begin])
        low, high = self._bounds[cluster : cluster + 2].tolist()
        return int(self._samples[low + cyclic_sample(turn, high - low, self._key("cluster", cluster))])

    def _block(self, piece: int, draw: int) -> tuple[int, int]:
        """The range [begin, end) of the draws of a piece that are shuffled together with `draw`.

        A block ends at the planned end of its piece at the latest; draws after that end have other blocks.
        """
        begin = draw // _BLOCK * _BLOCK
        if piece + 1 == len(self._planned):
            return begin, begin + _BLOCK
        last = self._planned[piece + 1] - self._planned[piece]
        return (begin, min(begin + _BLOCK, last)) if draw < last else (max(begin, last), begin + _BLOCK)

    def _deal(self, piece: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """For each draw of a block: its cluster, and the earlier turns of that cluster, int64."""
        key, clusters, turns = self._dealt
        if key != (piece, begin):
            key = (piece, begin)
            phase, bounds = self._phases(piece, piece + 1), self._bounds_of(piece, piece + 1)
            owner, counts = owners(np.arange(begin, end) + phase, bounds[0])
            counts += (self._turns_before(piece) - shares(phase, bounds)[0])[owner]
            clusters, turns = owner[shuffled(end - begin, self._key(f"block {begin}", piece))], counts.copy()
            # The turns of a cluster stay in ascending order.
            turns[np.argsort(clusters, kind="stable")] = counts[np.argsort(owner, kind="stable")]
            self._dealt = (key, clusters, turns)
        return clusters, turns

    def _turns_before(self, piece: int) -> np.ndarray:
        """The turns of each cluster before a piece, int64 [clusters]."""
        known, turns = self._turns
        if known != piece:
            known, turns = (known, turns.copy()) if known < piece else (0, np.zeros_like(turns))
            while known < piece:
                end = min(piece, known + max(1, _MOST_COUNTED // turns.size))
                phases, bounds = self._phases(known, end), self._bounds_of(known, end)
                draws = np.diff(self._planned[known : end + 1])
                turns += (shares(phases + draws, bounds) - shares(phases, bounds)).sum(axis=0)
                known = end
            self._turns = (piece, turns)
        return turns

    def _phases(self, begin: int, end: int) -> np.ndarray:
        """The number of the first draw of each piece, int64, random so that no cluster is favoured."""
        ends = self._bounds[begin + 1 : end + 1].tolist()
        return np.array([self._key("phase", k) % size for k, size in enumerate(ends, begin)], dtype=np.int64)

    def _bounds_of(self, begin: int, end: int) -> np.ndarray:
        """The bounds of the clusters in some pieces, int64 [pieces, clusters + 1]; later ones are empty."""
        return np.minimum(self._bounds, self._bounds[begin + 1 : end + 1, None])

    def _key(self, what: str, number: int) -> int:
        """A random key of 64 bits for one purpose."""
        digest = hashlib.blake2b(f"{self.spec.seed} {what} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def shuffled(size: int, key: int) -> np.ndarray:
    """Sort the numbers below `size` by the random numbers of SplitMix64 with seed `key`, int64 [size]."""
    steps = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    steps = (steps ^ (steps >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    steps = (steps ^ (steps >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(steps ^ (steps >> np.uint64(31)), kind="stable")


def owners(draws: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each draw: its cluster, and the earlier turns of that cluster, int64 like `draws`."""
    low, high = np.zeros_like(draws), np.full_like(draws, len(bounds) - 1)
    while (open_ := high - low > 1).any():
        middle = np.where(open_, (low + high) // 2, high)
        part, whole = bounds[middle] - bounds[low], bounds[high] - bounds[low]
        first = _share(draws, part, whole)
        in_lower = _share(draws + 1, part, whole) > first  # always true for a single cluster
        low, high = np.where(in_lower, low, middle), np.where(in_lower, middle, high)
        draws = np.where(in_lower, first, draws - first)
    return low, draws


def shares(draws: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The turns of each cluster among the first `draws` draws, int64 [deals, clusters].

    draws: int64 [deals]; bounds: int64 [deals, clusters + 1].
    """
    low, high = np.array([0]), np.array([bounds.shape[1] - 1])
    turns = np.asarray(draws, dtype=np.int64)[:, None]
    while (open_ := high - low > 1).any():
        middle = np.where(open_, (low + high) // 2, high)
        first = _share(turns, bounds[:, middle] - bounds[:, low], bounds[:, high] - bounds[:, low])
        low, high = _halves(low, middle, open_), _halves(middle, high, open_)
        turns = _halves(first, turns - first, open_)
    return turns


def _share(draws: np.ndarray, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """draws * part // whole without overflow of 64 bits; 0 for an empty whole."""
    whole = np.maximum(whole, 1)
    share: np.ndarray = draws // whole * part + draws % whole * part // whole
    return share


def _halves(first: np.ndarray, second: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """Along the last dim: both values where `open_` says that there are two halves, else the first value."""
    sides = np.stack([first, second], axis=-1)
    pairs: np.ndarray = sides[..., np.stack([np.ones_like(open_), open_], axis=-1)]
    return pairs
