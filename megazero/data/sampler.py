"""The samples that a data-parallel rank trains on next: a pure function of the samples consumed so far.

Nothing but `consumed_samples` is state, so a resumed run continues exactly, in the first epoch or the fifth,
and a batch-size ramp changes only how many micro-batches make a step. Ranks and batch sizes cut the order of
all samples into pieces and do not change it. They do change Megatron's own cyclic order, which is there for
those who ask for it (`data_sharding`).
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

import numpy as np

from megazero.data.shuffle import cyclic_sample
from megazero.errors import DataError


class SamplerKind(str, enum.Enum):
    """SINGLE: the dataset's own order, once. CYCLIC: a new order every epoch, for ever."""

    SINGLE = "single"
    CYCLIC = "cyclic"


@dataclass(frozen=True)
class SamplerSpec:
    """The fixed facts of a sampler.

    micro_batch_size: samples per rank and micro-batch; seed: the seed of CYCLIC's orders; data_sharding: each
    rank has a part of a CYCLIC epoch's data, shuffled as in Megatron (the seed is mixed with the epoch; 0
    gives Megatron's own numbers). Raises DataError for impossible values.
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
        """Whether the order is Megatron's, in which each rank has a part of the data."""
        return self.kind is SamplerKind.CYCLIC and self.data_sharding

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch in Megatron's order; what fills no micro-batch on all ranks is left out."""
        return self.num_samples - self.num_samples % self.stride


def batch_indices(spec: SamplerSpec, consumed_samples: int) -> np.ndarray:
    """Dataset indices of this rank's micro-batch after `consumed_samples`, int64 [micro_batch_size].

    A CYCLIC micro-batch may end one epoch and begin the next. Raises DataError past the end of a SINGLE
    dataset; with `data_sharding`, if `consumed_samples` is not a multiple of micro_batch_size *
    data_parallel_size within the epoch (one of these changed in the middle of it).
    """
    if consumed_samples < 0:
        raise DataError(f"`consumed_samples` must be at least 0, but is {consumed_samples}.")
    if spec.sharded:
        epoch, done = _epoch_of(spec, consumed_samples)
        return _of_part(spec, part_permutation(spec, epoch), done)
    if spec.kind is SamplerKind.SINGLE:
        _check_end(spec, consumed_samples)
    begin = consumed_samples + spec.data_parallel_rank * spec.micro_batch_size
    positions = range(begin, begin + spec.micro_batch_size)
    if spec.kind is SamplerKind.SINGLE:
        return np.array(positions, dtype=np.int64)
    return np.array([cyclic_sample(p, spec.num_samples, spec.seed) for p in positions], dtype=np.int64)


def part_permutation(spec: SamplerSpec, epoch: int) -> np.ndarray:
    """The order of epoch `epoch` within each rank's part under `data_sharding`, int64."""
    import torch  # here, so that reading and preparing data needs no torch

    generator = torch.Generator()
    generator.manual_seed(_generator_seed(spec.seed, epoch))
    size = spec.samples_per_epoch // spec.data_parallel_size
    return torch.randperm(size, generator=generator).numpy()


def _generator_seed(seed: int, epoch: int) -> int:
    """32 bits, as torch's CPU generator uses no more: the epoch for seed 0, else a hash of both."""
    if seed == 0:
        return epoch
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _check_end(spec: SamplerSpec, consumed: int) -> None:
    if consumed + spec.stride > spec.num_samples:
        raise DataError(
            f"`consumed_samples` must leave a micro-batch of {spec.stride} within the {spec.num_samples} "
            f"samples, but is {consumed}; train for fewer samples, give more data or choose the cyclic "
            "sampler."
        )


def _epoch_of(spec: SamplerSpec, consumed: int) -> tuple[int, int]:
    """(epoch, samples consumed within it) under `data_sharding`."""
    epoch, done = divmod(consumed, spec.samples_per_epoch)
    if done % spec.stride:
        raise DataError(
            f"`consumed_samples` must be a multiple of micro_batch_size * data_parallel_size ({spec.stride}) "
            f"within an epoch with `data_sharding`, but is {consumed}; resume with the same product."
        )
    return epoch, done


def _of_part(spec: SamplerSpec, permutation: np.ndarray, done: int) -> np.ndarray:
    begin = done // spec.data_parallel_size
    first = spec.data_parallel_rank * permutation.size
    return first + permutation[begin : begin + spec.micro_batch_size]


class BatchSampler:
    """`batch_indices` with the current permutation of Megatron's order kept, so that a step costs a slice.

    CYCLIC goes on for ever, and SINGLE raises DataError past the end rather than repeat or stop quietly.
    """

    def __init__(self, spec: SamplerSpec):
        self.spec = spec
        # One value, so that threads see an epoch with its own permutation.
        self._kept: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def at(self, consumed_samples: int) -> np.ndarray:
        """`batch_indices` at any position; changes no state and may be called from several threads."""
        if not self.spec.sharded or consumed_samples < 0:
            return batch_indices(self.spec, consumed_samples)
        epoch, done = _epoch_of(self.spec, consumed_samples)
        kept, permutation = self._kept
        if epoch != kept:
            permutation = part_permutation(self.spec, epoch)
            self._kept = (epoch, permutation)
        return _of_part(self.spec, permutation, done)
