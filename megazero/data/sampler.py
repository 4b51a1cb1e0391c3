"""The samples that a data-parallel rank trains on next: a pure function of the samples consumed so far.

`consumed_samples` is the only state, so a resumed run continues exactly, in any epoch, and a batch-size ramp
only changes the number of micro-batches in a step. Ranks and batch sizes divide one order of all samples and
do not change it. The exception is Megatron's own cyclic order (`data_sharding`), which depends on both.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

import numpy as np

from megazero.data.shuffle import cyclic_sample
from megazero.errors import DataError


class SamplerKind(str, enum.Enum):
    """SINGLE: the dataset's own order, once. CYCLIC: epochs without end, each in a new order."""

    SINGLE = "single"
    CYCLIC = "cyclic"


@dataclass(frozen=True)
class SamplerSpec:
    """The parameters of a sampler.

    micro_batch_size: samples per rank and micro-batch; seed: of CYCLIC orders; data_sharding: each rank has
    its own part of a CYCLIC epoch, shuffled as in Megatron (the seed is mixed with the epoch; seed 0 gives
    Megatron's own order). Raises DataError for impossible values.
    """

    num_samples: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    kind: SamplerKind = SamplerKind.SINGLE
    seed: int = 0
    data_sharding: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", SamplerKind(self.kind))
        if self.micro_batch_size < 1:
            raise DataError(f"`micro_batch_size` must be at least 1, but is {self.micro_batch_size}.")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise DataError(
                f"`data_parallel_rank` must be below `data_parallel_size` ({self.data_parallel_size}), but "
                f"is {self.data_parallel_rank}."
            )
        if self.num_samples < 1:
            raise DataError(f"`num_samples` must be at least 1, but is {self.num_samples}; give more data.")
        if self.num_samples < self.stride and (self.sharded or self.kind is SamplerKind.SINGLE):
            raise DataError(
                f"`num_samples` must be at least one micro-batch on every rank ({self.micro_batch_size} * "
                f"{self.data_parallel_size}), but is {self.num_samples}; give more data."
            )

    @property
    def stride(self) -> int:
        """Samples that one micro-batch consumes over all ranks."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def sharded(self) -> bool:
        """Whether the order is Megatron's, in which each rank has its own part of the data."""
        return self.kind is SamplerKind.CYCLIC and self.data_sharding

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch in Megatron's order, which leaves out an incomplete last micro-batch."""
        return self.num_samples - self.num_samples % self.stride


def batch_indices(spec: SamplerSpec, consumed_samples: int) -> np.ndarray:
    """The sample numbers of this rank's micro-batch after `consumed_samples`, int64 [micro_batch_size].

    A CYCLIC micro-batch may span two epochs. Raises DataError past the end of a SINGLE dataset; also, with
    `data_sharding`, if the samples consumed within the epoch are not a multiple of micro_batch_size *
    data_parallel_size (if one of these changed during the epoch).
    """
    if consumed_samples < 0:
        raise DataError(f"`consumed_samples` must be at least 0, but is {consumed_samples}.")
    if spec.sharded:
        epoch, done = _epoch_of(spec, consumed_samples)
        return _slice_of_rank(spec, part_permutation(spec, epoch), done)
    if spec.kind is SamplerKind.SINGLE and consumed_samples + spec.stride > spec.num_samples:
        raise DataError(
            f"`consumed_samples` must leave a micro-batch of {spec.stride} within the {spec.num_samples} "
            f"samples, but is {consumed_samples}; train for fewer samples, give more data or choose the "
            "cyclic sampler."
        )
    begin = consumed_samples + spec.data_parallel_rank * spec.micro_batch_size
    positions = range(begin, begin + spec.micro_batch_size)
    if spec.kind is SamplerKind.SINGLE:
        return np.array(positions, dtype=np.int64)
    return np.array([cyclic_sample(p, spec.num_samples, spec.seed) for p in positions], dtype=np.int64)


def part_permutation(spec: SamplerSpec, epoch: int) -> np.ndarray:
    """The order of an epoch within the part of each rank with `data_sharding`, int64 [samples of a part]."""
    import torch  # here, so that reading and preparing data needs no torch

    generator = torch.Generator()
    generator.manual_seed(_generator_seed(spec.seed, epoch))
    size = spec.samples_per_epoch // spec.data_parallel_size
    return torch.randperm(size, generator=generator).numpy()


def _generator_seed(seed: int, epoch: int) -> int:
    """The epoch for seed 0, else a hash of both; 32 bits, as torch's CPU generator uses no more."""
    if seed == 0:
        return epoch
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _epoch_of(spec: SamplerSpec, consumed: int) -> tuple[int, int]:
    """(epoch, samples consumed within it) with `data_sharding`."""
    epoch, done = divmod(consumed, spec.samples_per_epoch)
    if done % spec.stride:
        raise DataError(
            f"`consumed_samples` must be a multiple of micro_batch_size * data_parallel_size ({spec.stride}) "
            f"within an epoch with `data_sharding`, but is {consumed}; resume with the same product."
        )
    return epoch, done


def _slice_of_rank(spec: SamplerSpec, permutation: np.ndarray, done: int) -> np.ndarray:
    begin = done // spec.data_parallel_size
    first = spec.data_parallel_rank * permutation.size
    return first + permutation[begin : begin + spec.micro_batch_size]


class BatchSampler:
    """`batch_indices` that caches the permutation of Megatron's order for an epoch.

    CYCLIC never ends; SINGLE raises DataError past the end rather than repeat or stop silently.
    """

    def __init__(self, spec: SamplerSpec):
        self.spec = spec
        # A single value, so that a thread always reads an epoch with its own permutation.
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def at(self, consumed_samples: int) -> np.ndarray:
        """`batch_indices` at any position; several threads may call it at once."""
        if not self.spec.sharded or consumed_samples < 0:
            return batch_indices(self.spec, consumed_samples)
        epoch, done = _epoch_of(self.spec, consumed_samples)
        cached_epoch, permutation = self._cached
        if epoch != cached_epoch:
            permutation = part_permutation(self.spec, epoch)
            self._cached = (epoch, permutation)
        return _slice_of_rank(self.spec, permutation, done)
