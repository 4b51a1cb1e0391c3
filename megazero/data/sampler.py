"""Which samples a data-parallel rank trains on next: a pure function of the samples consumed so far.

Nothing but `consumed_samples` is state, so a resumed run continues exactly, in the first epoch or the fifth,
and a batch-size ramp changes only how many micro-batches make a step. The two orders are Megatron's.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megazero.errors import DataError


class SamplerKind(str, enum.Enum):
    """SINGLE: the dataset's own order, once. CYCLIC: a fresh permutation every epoch, for ever."""

    SINGLE = "single"
    CYCLIC = "cyclic"


@dataclass(frozen=True)
class SamplerSpec:
    """The fixed facts of a sampler.

    micro_batch_size: samples per rank and micro-batch; seed: the seed of CYCLIC's permutations, mixed with
    the epoch (0 gives Megatron's own, which depend on the epoch alone); data_sharding: CYCLIC gives each rank
    its own part of the data rather than a stride of one permutation. Raises DataError for impossible values.
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
        if self.num_samples < self.stride:
            raise DataError(
                f"`num_samples` must be at least one micro-batch on every rank ({self.micro_batch_size} * "
                f"{self.data_parallel_size}), but is {self.num_samples}; give more data."
            )

    @property
    def stride(self) -> int:
        """Samples that one micro-batch consumes over all ranks."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples of a CYCLIC epoch; the remainder that fills no micro-batch is left out."""
        return self.num_samples - self.num_samples % self.stride


def batch_indices(spec: SamplerSpec, consumed_samples: int) -> np.ndarray:
    """Dataset indices of this rank's micro-batch after `consumed_samples`, int64 [micro_batch_size].

    Raises DataError past the end of a SINGLE dataset, and for a CYCLIC one if `consumed_samples` is not a
    multiple of micro_batch_size * data_parallel_size (the run's micro-batch changed within an epoch).
    """
    if consumed_samples < 0:
        raise DataError(f"`consumed_samples` must be at least 0, but is {consumed_samples}.")
    if spec.kind is SamplerKind.SINGLE:
        return _single(spec, consumed_samples)
    epoch, done = _epoch_of(spec, consumed_samples)
    return _cyclic(spec, epoch_permutation(spec, epoch), done)


def epoch_permutation(spec: SamplerSpec, epoch: int) -> np.ndarray:
    """The order of epoch `epoch` of a CYCLIC sampler, int64; of this rank's own part with `data_sharding`."""
    import torch  # here, so that reading and preparing data needs no torch

    if spec.data_sharding:
        size = spec.samples_per_epoch // spec.data_parallel_size
    else:
        size = spec.num_samples // spec.micro_batch_size * spec.micro_batch_size
    generator = torch.Generator()
    generator.manual_seed(_generator_seed(spec.seed, epoch))
    return torch.randperm(size, generator=generator).numpy()


def _generator_seed(seed: int, epoch: int) -> int:
    """32 bits, as torch's CPU generator uses no more: the epoch for seed 0, else a hash of both."""
    if seed == 0:
        return epoch
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _single(spec: SamplerSpec, consumed: int) -> np.ndarray:
    if consumed + spec.stride > spec.num_samples:
        raise DataError(
            f"`consumed_samples` must leave a micro-batch of {spec.stride} within the {spec.num_samples} "
            f"samples, but is {consumed}; train for fewer samples, give more data or choose the cyclic "
            "sampler."
        )
    begin = consumed + spec.data_parallel_rank * spec.micro_batch_size
    return np.arange(begin, begin + spec.micro_batch_size, dtype=np.int64)


def _epoch_of(spec: SamplerSpec, consumed: int) -> tuple[int, int]:
    """(epoch, samples consumed within it)."""
    epoch, done = divmod(consumed, spec.samples_per_epoch)
    if done % spec.stride:
        raise DataError(
            f"`consumed_samples` must be a multiple of micro_batch_size * data_parallel_size ({spec.stride}) "
            f"within an epoch, but is {consumed}; resume with the same product."
        )
    return epoch, done


def _cyclic(spec: SamplerSpec, permutation: np.ndarray, done: int) -> np.ndarray:
    if spec.data_sharding:
        begin = done // spec.data_parallel_size
        first = spec.data_parallel_rank * permutation.size
        return first + permutation[begin : begin + spec.micro_batch_size]
    begin = done + spec.data_parallel_rank
    return permutation[begin : begin + spec.stride : spec.data_parallel_size][: spec.micro_batch_size]


class BatchSampler:
    """Iterates micro-batches of indices; its state is `consumed_samples` and nothing else.

    It never ends (StopIteration): CYCLIC goes on for ever, and SINGLE raises DataError past the end rather
    than repeat or stop quietly. The current epoch's permutation is kept, so a step costs only a slice.
    """

    def __init__(self, spec: SamplerSpec, consumed_samples: int = 0):
        self.spec = spec
        self.consumed_samples = consumed_samples
        # One value, so that threads see an epoch with its own permutation.
        self._kept: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        indices = self.at(self.consumed_samples)
        self.consumed_samples += self.spec.stride
        return indices

    def at(self, consumed_samples: int) -> np.ndarray:
        """`batch_indices` at any position; changes no state and may be called from several threads."""
        if self.spec.kind is SamplerKind.SINGLE or consumed_samples < 0:
            return batch_indices(self.spec, consumed_samples)
        epoch, done = _epoch_of(self.spec, consumed_samples)
        kept, permutation = self._kept
        if epoch != kept:
            permutation = epoch_permutation(self.spec, epoch)
            self._kept = (epoch, permutation)
        return _cyclic(self.spec, permutation, done)
