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
from megazero.data_efficiency.turns import owner, shares
from megazero.errors import DataError

_MIXED = 256  # draws that are shuffled among each other, so that clusters do not take turns in a pattern


class CurriculumSampler:
    """Which samples each micro-batch takes; has the protocol of `megazero.data.BatchSampler`.

    spec: this rank's share of each micro-batch; its `num_samples` are those of the dataset. order: what may
    be drawn when. begins: for each piece of `order`, how many samples are consumed when it begins, in this
    run. planned: the same in a training with these settings from the beginning on; the two differ only where
    the batch size was changed on the way. Nothing here is state: `at` is a function of its argument.
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
        self._bounds = [0, *(int(order.ends[k]) for k in kept)]
        # One value, so that threads see the number of a piece with its own counts.
        self._before: tuple[int, np.ndarray] = (0, np.zeros(len(kept), dtype=np.int64))

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
        found = np.array([self._drawn(place) for place in places], dtype=np.int64)
        if found.min() < 0 or found.max() >= self.spec.num_samples:
            raise DataError(
                f"`index_to_sample_path` must list samples of the dataset, 0..{self.spec.num_samples - 1}, "
                f"but lists {found.tolist()}; analyze this dataset."
            )
        return found

    def _drawn(self, place: int) -> int:
        """The sample at a place of the training order."""
        piece = max(0, bisect_right(self._begins, place) - 1)
        cluster, turn = owner(self._mixed(piece, place - self._planned[piece]), self._bounds[: piece + 2])
        begin, end = self._bounds[cluster : cluster + 2]
        turn += int(self._turns_before(piece)[cluster])
        return int(self._samples[begin + cyclic_sample(turn, end - begin, self._key("cluster", cluster))])

    def _mixed(self, piece: int, draw: int) -> int:
        """Another draw of the same piece, close by."""
        block, within = divmod(draw, _MIXED)
        size = _MIXED
        if piece + 1 < len(self._planned):
            left = self._draws(piece) - block * _MIXED
            # Nothing is left where a run with other batch sizes than planned stays longer in the piece.
            size = min(size, left) if left > within else size
        return block * _MIXED + cyclic_sample(block * size + within, size, self._key("order", piece))

    def _draws(self, piece: int) -> int:
        """How many draws a piece has, if another one follows."""
        return self._planned[piece + 1] - self._planned[piece]

    def _turns_before(self, piece: int) -> np.ndarray:
        """How often each cluster is drawn from before a piece, int64 [clusters]."""
        known, turns = self._before
        if known != piece:
            if known > piece:
                known, turns = 0, np.zeros_like(turns)
            turns = turns.copy()
            for earlier in range(known, piece):
                bounds = np.array(self._bounds[: earlier + 2], dtype=np.int64)
                turns[: earlier + 1] += shares(self._draws(earlier), bounds)
            self._before = (piece, turns)
        return turns

    def _key(self, what: str, number: int) -> int:
        """A seed of its own for each permutation."""
        digest = hashlib.blake2b(f"{self.spec.seed} {what} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
