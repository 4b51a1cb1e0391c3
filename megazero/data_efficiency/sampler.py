"""Draws samples by a curriculum: a pure function of the seed and of a place in the training order.

The method is DeepSpeed's (Data Efficiency, Li et al. 2024): samples that become eligible together are a
cluster; a draw takes from a cluster as often as it is large, and each cluster is gone through in a random
order of its own, again and again. There it takes a random generator and files of clusters, all of which are
state. Here it takes counting alone: how often each cluster was drawn from before a place follows from the
place, and the order of a cluster is a keyed permutation.
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
from megazero.data_efficiency.turns import owners, shares
from megazero.errors import DataError

_BLOCK = 256  # draws that are shuffled among each other, so that clusters take turns in no pattern
_AT_A_TIME = 1 << 20  # turns that are counted at once, to bound memory


class CurriculumSampler:
    """The samples of each micro-batch; has the protocol of `megazero.data.sampler.BatchSampler`.

    spec: this rank's share of each micro-batch; its `num_samples` are those of the dataset. order: what may
    be drawn when. begins: for each piece of `order`, how many samples are consumed when it begins, in this
    run. planned: the same in a training with these settings from the beginning on; the two differ only where
    the batch size was changed on the way. What it keeps saves time; `at` is a function of its argument.
    """

    def __init__(
        self, spec: SamplerSpec, order: EligibilityOrder, begins: tuple[int, ...], planned: tuple[int, ...]
    ):
        self.spec = spec
        self._samples = order.samples
        # A piece that adds no sample goes on with the one before it.
        kept = [k for k, end in enumerate(order.ends) if k == 0 or end > order.ends[k - 1]]
        self._begins = [begins[k] for k in kept]
        self._planned = [planned[k] for k in kept]
        self._bounds = np.array([0, *(order.ends[k] for k in kept)], dtype=np.int64)
        # Each is one value, so that threads see what is kept with what it is of.
        self._turns: tuple[int, np.ndarray] = (0, np.zeros(len(kept), dtype=np.int64))
        self._dealt: tuple[tuple[int, int], np.ndarray, np.ndarray] = ((-1, 0), np.empty(0), np.empty(0))

    @classmethod
    def of(
        cls, spec: SamplerSpec, order: EligibilityOrder, difficulties: Difficulties, steps: Steps
    ) -> CurriculumSampler:
        """The sampler of a run whose steps are these."""
        return cls(
            spec, order, difficulties.first_samples(steps), difficulties.first_samples(steps.from_beginning)
        )

    def at(self, consumed_samples: int) -> np.ndarray:
        """Sample numbers of this rank's micro-batch, int64 [micro_batch_size]; from any thread.

        Raises DataError if the order lists a sample that the dataset does not have.
        """
        first = consumed_samples + self.spec.data_parallel_rank * self.spec.micro_batch_size
        places = range(first, first + self.spec.micro_batch_size)
        numbers = np.array([self._drawn(place) for place in places], dtype=np.int64)
        if numbers.min() < 0 or numbers.max() >= self.spec.num_samples:
            raise DataError(
                f"`index_to_sample_path` must list samples of the dataset, 0..{self.spec.num_samples - 1}, "
                f"but lists {numbers.tolist()}; analyze this dataset."
            )
        return numbers

    def _drawn(self, place: int) -> int:
        """The sample at a place of the training order."""
        piece = max(0, bisect_right(self._begins, place) - 1)
        draw = place - self._planned[piece]
        begin, end = self._block(piece, draw)
        clusters, turns = self._deal(piece, begin, end)
        cluster, turn = int(clusters[draw - begin]), int(turns[draw - begin])
        low, high = self._bounds[cluster : cluster + 2].tolist()
        return int(self._samples[low + cyclic_sample(turn, high - low, self._key("cluster", cluster))])

    def _block(self, piece: int, draw: int) -> tuple[int, int]:
        """The draws of a piece, from and to, that are shuffled among each other and hold this one.

        A block does not reach beyond the planned end of its piece, so that it is as if the piece went on.
        """
        begin = draw // _BLOCK * _BLOCK
        if piece + 1 == len(self._planned):
            return begin, begin + _BLOCK
        last = self._planned[piece + 1] - self._planned[piece]
        return (begin, min(begin + _BLOCK, last)) if draw < last else (max(begin, last), begin + _BLOCK)

    def _deal(self, piece: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(cluster, turn of this cluster since the training began) of each draw of a block, int64."""
        key, clusters, turns = self._dealt
        if key != (piece, begin):
            key = (piece, begin)
            phase, bounds = self._phases(piece, piece + 1), self._bounds_of(piece, piece + 1)
            owner, counts = owners(np.arange(begin, end) + phase, bounds[0])
            counts += (self._turns_before(piece) - shares(phase, bounds)[0])[owner]
            clusters, turns = owner[shuffled(end - begin, self._key(f"block {begin}", piece))], counts.copy()
            # A cluster's turns keep their order.
            turns[np.argsort(clusters, kind="stable")] = counts[np.argsort(owner, kind="stable")]
            self._dealt = (key, clusters, turns)
        return clusters, turns

    def _turns_before(self, piece: int) -> np.ndarray:
        """The number of draws from each cluster before a piece, int64 [clusters]."""
        known, turns = self._turns
        if known != piece:
            known, turns = (known, turns.copy()) if known < piece else (0, np.zeros_like(turns))
            while known < piece:
                end = min(piece, known + max(1, _AT_A_TIME // turns.size))
                phases, bounds = self._phases(known, end), self._bounds_of(known, end)
                draws = np.diff(self._planned[known : end + 1])
                turns += (shares(phases + draws, bounds) - shares(phases, bounds)).sum(axis=0)
                known = end
            self._turns = (piece, turns)
        return turns

    def _phases(self, begin: int, end: int) -> np.ndarray:
        """The draws at which pieces begin, int64: if always at one cluster, it would have more turns."""
        ends = self._bounds[begin + 1 : end + 1].tolist()
        return np.array([self._key("phase", k) % size for k, size in enumerate(ends, begin)], dtype=np.int64)

    def _bounds_of(self, begin: int, end: int) -> np.ndarray:
        """The bounds of clusters in pieces, where later clusters are empty, int64 [pieces, clusters + 1]."""
        return np.minimum(self._bounds, self._bounds[begin + 1 : end + 1, None])

    def _key(self, what: str, number: int) -> int:
        """64 bits of its own for each random choice."""
        digest = hashlib.blake2b(f"{self.spec.seed} {what} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def shuffled(size: int, key: int) -> np.ndarray:
    """A random order of the numbers below `size`, int64: that of SplitMix64's numbers from `key` on."""
    steps = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    steps = (steps ^ (steps >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    steps = (steps ^ (steps >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(steps ^ (steps >> np.uint64(31)), kind="stable")
