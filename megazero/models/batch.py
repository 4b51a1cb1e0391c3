"""`MicroBatch`, and `Batch` for text: the arrays of a dataset as tensors on the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from megazero.config.derive import sequence_multiple
from megazero.config.tree.config import Config
from megazero.config.tree.parallel import ParallelConfig
from megazero.data.range_checks import check_token_ids
from megazero.host_memory import sent_to
from megazero.layers.inputs import NOTHING_SKIPPED, Skipping
from megazero.layers.placement import SequenceCut
from megazero.layers.rows import columns_of
from megazero.models.multi_token.inputs import MtpInputs
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys
from megazero.ops.attention import Documents, Runs
from megazero.ops.positions import Positions

_BY_COLUMN = ("tokens", "labels", "loss_mask")
M = TypeVar("M", bound="MicroBatch")
M_co = TypeVar("M_co", bound="MicroBatch", covariant=True)
M_contra = TypeVar("M_contra", bound="MicroBatch", contravariant=True)
COLUMNS = 8
"""Widths of padded micro-batches are multiples of this, which suits every kernel."""
SampleIndex = int | tuple[int, int]
"""Position of a row's sample in the training order; (position, number of the row) for its further rows."""
Collate = Callable[[Mapping[str, np.ndarray], tuple[SampleIndex, ...]], M_co]
"""Make a micro-batch of a dataset's arrays, given the sample of each row."""


@dataclass(frozen=True)
class Places:
    """The positions of a micro-batch's tokens, and their segments, documents and samples.

    Attributes:
        positions: positions of the columns in their sequences: a range, or int64 [s] or [b, s]; None means
            from 0.
        embedded: int64 [b, s] or [s], the positions to embed; None means `positions`.
        token_types: int64 [b, s], the segment of each token; None in families without token types.
        documents: int32 [b, s], document ids; tokens attend only within equal ids. None: to all.
        sample_keys: the keys of the samples' random streams, int64 [b]; [b, s] if samples share rows, so that
            a sample's dropout does not depend on its neighbours. None turns dropout off.
    """

    positions: Positions | None = None
    embedded: Tensor | None = None
    token_types: Tensor | None = None
    documents: Documents | None = None
    sample_keys: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch(ABC):
    """`b` sequences of `s` tokens, the input of every model; families add what their heads need.

    With context parallelism, tokens, token types and targets have this rank's columns only, [b, s/cp]; all
    else is of whole sequences.

    Attributes:
        tokens: int64 [b, s].
        places: the positions, segments, documents and samples of the tokens.
        skipping: the tokens and layers that the step skips.
    """

    tokens: Tensor
    _: KW_ONLY
    places: Places = Places()
    skipping: Skipping = NOTHING_SKIPPED

    of_sequences: ClassVar[frozenset[str]] = frozenset({"sequences", "micro_batches"})
    """Names of counts of whole sequences, which every context-parallel rank counts in full."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, float]:
        """Name in `LossTerm.over` -> the divisor of sums over the micro-batch, a number on the host."""

    def counts_of_share(self, sharers: int) -> dict[str, float]:
        """The counts of one of `sharers` ranks that share the sequences; all of them add up to the total."""
        return {name: n / sharers if name in self.of_sequences else n for name, n in self.counts.items()}


@dataclass(frozen=True)
class Batch(MicroBatch):
    """A micro-batch of text.

    Attributes:
        targets: the next token of each position; None when generating.
        ahead: the inputs of multi-token prediction, for each depth 1, 2, ...
    """

    targets: Targets | None = None
    ahead: tuple[MtpInputs, ...] = ()

    @property
    def learnt(self) -> Targets:
        """The targets, which a training batch has."""
        assert self.targets is not None, "a training batch has labels"
        return self.targets

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], device: torch.device, vocab_size: int) -> Batch:
        """Make a batch of a dataset's arrays, by name, without waiting for the device; ignores other names.

        Raises:
            DataError: a token or label lies outside [0, vocab_size). The model does not check again.
        """
        check_token_ids(arrays, vocab_size)

        def tensor(name: str) -> Tensor | None:
            return tensor_of(arrays[name], device) if name in arrays else None

        targets = None
        if "labels" in arrays:
            counted = float(arrays["loss_mask"].sum(dtype="float64")) if "loss_mask" in arrays else None
            targets = Targets(tensor_of(arrays["labels"], device), tensor("loss_mask"), counted)
        places = Places(
            embedded=tensor("position_ids"),
            documents=documents_on(device, arrays.get("document_ids")),
            sample_keys=tensor("sample_keys"),
        )
        return cls(tensor_of(arrays["tokens"], device), targets, places=places)

    @property
    def counts(self) -> dict[str, float]:
        """The weighted number of positions with a loss, and the numbers of tokens and sequences."""
        tokens = float(self.tokens.numel())
        return {
            "lm": tokens if self.targets is None else self.targets.count,
            "tokens": tokens,
            "sequences": float(len(self.tokens)),
            "micro_batches": 1.0,
            **{f"mtp_{depth}": ahead.targets.count for depth, ahead in enumerate(self.ahead, 1)},
        }


@dataclass(frozen=True)
class Columns:
    """The columns of sequences that context-parallel rank `rank` has (see `layers.rows.columns_of`)."""

    rank: int = 0
    ranks: int = 1
    zigzag: bool = False

    @classmethod
    def of(cls, parallel: ParallelConfig, context: ParallelContext) -> Columns:
        """The columns of this rank."""
        group = context.groups["cp"]
        return cls(group.rank, group.size, SequenceCut.of(parallel).zigzag)

    def own(self, array: np.ndarray) -> np.ndarray:
        """This rank's columns of an array [b, s]."""
        if self.ranks == 1:
            return array
        runs = columns_of(self.rank, self.ranks, array.shape[1], zigzag=self.zigzag)
        return np.concatenate([array[:, run.start : run.stop] for run in runs], 1)

    def places(self, length: int) -> np.ndarray:
        """Map each of `length` columns to its index among this rank's columns, or -1: int64 [length]."""
        places = np.full(length, -1)
        own = self.own(np.arange(length)[None])[0]
        places[own] = np.arange(len(own))
        return places


ALL_COLUMNS = Columns()


@dataclass(frozen=True)
class TextCollate:
    """Turns a dataset's arrays into a `Batch`, without arrays that would change nothing: a mask of ones, and
    positions that count from 0.

    Attributes:
        with_positions: whether to keep the positions, because they do not count from 0.
        seed: seed of the dropout streams; None for evaluation, which drops nothing.
        columns: the columns of this rank.
        depths: number of further tokens to predict (multi-token prediction).
    """

    vocab_size: int
    device: torch.device
    with_positions: bool = False
    seed: int | None = None
    columns: Columns = ALL_COLUMNS
    depths: int = 0

    @classmethod
    def of(cls, config: Config, vocab_size: int, context: ParallelContext, seed: int | None) -> TextCollate:
        """Make the collate function of a configuration."""
        columns, depths = Columns.of(config.parallel, context), config.model.mtp_num_layers or 0
        return cls(vocab_size, context.device, config.data.reset_position_ids, seed, columns, depths)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> Batch:
        """Make a batch, given the sample of each row.

        Raises:
            DataError: a token or label lies outside the vocabulary.
        """
        kept = {k: v for k, v in arrays.items() if k != "position_ids" or self.with_positions}
        if "loss_mask" in kept and (kept["loss_mask"] == 1).all():
            del kept["loss_mask"]
        if self.seed is not None:
            kept["sample_keys"] = sample_keys(self.seed, samples)
        kept |= {name: self.columns.own(kept[name]) for name in _BY_COLUMN if name in kept}
        batch = Batch.from_arrays(kept, self.device, self.vocab_size)
        ahead = MtpInputs.of_arrays(arrays, self.depths, self.columns.own, self.device)
        return replace(batch, ahead=ahead) if ahead else batch


def column_multiple(config: Config) -> int:
    """The divisor of padded widths: that of kernels, and of the ranks that split the rows evenly."""
    return math.lcm(COLUMNS, sequence_multiple(config.parallel))


def tensor_of(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, without waiting for it."""
    return sent_to(device, torch.from_numpy(np.ascontiguousarray(array)))


def documents_on(device: torch.device, ids: np.ndarray | None) -> Documents | None:
    """Make `Documents` of ids [b, s], with their runs on accelerators, whose kernels need them."""
    if ids is None:
        return None
    runs = None if device.type == "cpu" else Runs.of(ids, device)
    return Documents(tensor_of(ids, device), runs, ids)


def random_text(rng: np.random.Generator, count: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Arrays of `count` random sequences; in sequence i, about 1 / (1 + i) of the positions have a loss."""
    text = rng.integers(0, vocab_size, (count, length + 1))
    share = 1.0 / (1 + np.arange(count))[:, None]
    mask = (rng.random((count, length)) < share).astype(np.float32)
    arrays = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
