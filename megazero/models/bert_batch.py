"""One micro-batch of BERT samples, without columns of padding, and optionally packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.config.tree.config import Config
from megazero.data.range_checks import check_token_ids
from megazero.loss import PADDING
from megazero.models.batch import (
    ALL_COLUMNS,
    COLUMNS,
    Columns,
    MicroBatch,
    Places,
    SampleIndex,
    column_multiple,
    documents_on,
    tensor_of,
)
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys


@dataclass(frozen=True)
class MaskedTargets:
    """The tokens that BERT's heads read, and their targets.

    Attributes:
        masked: int64 [m], the indices of the masked tokens in hidden states flattened from [s, b, h] to
            [s b, h].
        labels: int64 [m], the ids that were masked.
        firsts: int64 [n], the indices of the samples' first tokens, likewise.
        is_random: int64 [n], 1 if a sample's segments are not in order.
        wanted: int64 [r, b], the columns of each row that contain these tokens, filled up with others to r
            columns; None: all columns.
    """

    masked: Tensor
    labels: Tensor
    firsts: Tensor
    is_random: Tensor
    wanted: Tensor | None = None


@dataclass(frozen=True)
class BertBatch(MicroBatch):
    """A micro-batch of `n` samples in `b` rows of `s` tokens; without packing, `b` is `n`.

    Token types are segments. If samples share rows, positions are explicit. Document ids are the numbers of
    samples, -1 for padding.

    Attributes:
        targets: the tokens that the heads read, and their targets.
        padding: number of padding positions, if every sample were padded to the sequence length.
        room: number of positions of the samples at the sequence length.
    """

    of_sequences = frozenset({"micro_batches"})

    targets: MaskedTargets
    padding: int
    room: int

    def places_among_wanted(self, places: Tensor) -> Tensor:
        """Convert flat indices into hidden states [s, b, h] to indices into their wanted rows [r, b, h]."""
        wanted = self.targets.wanted
        assert wanted is not None, "all columns are wanted"
        b, s = self.tokens.shape
        among = places.new_zeros(s, b)
        rows = torch.arange(b, device=places.device)
        among[wanted, rows] = torch.arange(wanted.numel(), device=places.device).view(-1, b)
        return among.view(-1)[places]

    @property
    def counts(self) -> dict[str, float]:
        """The count of each loss term: masked tokens, samples, or positions.

        The fraction of padding is that of the dataset, not of this batch, whose trimming and packing depend
        on which samples share it.
        """
        masked, samples = float(len(self.targets.masked)), float(len(self.targets.firsts))
        return {
            "lm": masked,
            "lm_accuracy": masked,
            "sop": samples,
            "sop_accuracy": samples,
            PADDING: float(self.room),
            "tokens": float(self.room - self.padding),
            "sequences": samples,
            "micro_batches": 1.0,
        }


@dataclass(frozen=True)
class Slot:
    """The row and column of a sequence's first token."""

    row: int
    column: int


def pack(lengths: Sequence[int], capacity: int) -> list[Slot]:
    """Pack sequences into rows of `capacity` tokens by first-fit decreasing; return the slot of each.

    It uses at most 11/9 of the fewest possible rows, plus one (Johnson 1973).
    """
    assert all(0 < length <= capacity for length in lengths), f"{lengths} must fit into {capacity}"
    fill: list[int] = []
    slots: dict[int, Slot] = {}
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, used in enumerate(fill) if used + lengths[number] <= capacity), len(fill))
        if row == len(fill):
            fill.append(0)
        slots[number] = Slot(row, fill[row])
        fill[row] += lengths[number]
    return [slots[number] for number in range(len(lengths))]


@dataclass(frozen=True)
class BertCollate:
    """Turns the arrays of a `BERTDataset` into a `BertBatch`, trimming columns that hold only padding.

    Attributes:
        multiple: the number of columns is a multiple of this.
        packed: whether samples share rows.
        seed: seed of the dropout streams; None for evaluation, which drops nothing.
        whole: whether to keep all columns, because random-LTD chooses among them, and its choice must not
            depend on which samples share a micro-batch.
        columns: the columns of this rank. Targets belong to the rank that has their column; the first rank
            counts padding.
    """

    vocab_size: int
    device: torch.device
    multiple: int = COLUMNS
    packed: bool = False
    seed: int | None = None
    whole: bool = False
    columns: Columns = ALL_COLUMNS

    @classmethod
    def of(cls, config: Config, vocab_size: int, context: ParallelContext, seed: int | None) -> BertCollate:
        """Make the collate function of a configuration."""
        whole, multiple = config.skipping.random_ltd and seed is not None, column_multiple(config)
        columns, packed = Columns.of(config.parallel, context), config.data.bert_pack
        return cls(vocab_size, context.device, multiple, packed, seed, whole, columns)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> BertBatch:
        """Make a batch without waiting for the device; `samples` are positions in the training order.

        Raises:
            DataError: a token or label lies outside the vocabulary.
        """
        mask, capacity = arrays["loss_mask"] != 0, arrays["tokens"].shape[1]
        check_token_ids({"tokens": arrays["tokens"], "labels": arrays["labels"][mask]}, self.vocab_size)
        # The curriculum may have cut samples to fewer columns than their length.
        lengths = np.minimum(arrays["lengths"], capacity)
        if self.packed:
            slots = pack(lengths.tolist(), capacity)
        else:
            slots = [Slot(row, 0) for row in range(len(lengths))]
        rows = 1 + max(slot.row for slot in slots)
        fill = np.zeros(rows, dtype=np.int64)
        np.add.at(fill, [slot.row for slot in slots], lengths)
        needed = -(-int(fill.max()) // self.multiple) * self.multiple
        width = capacity if self.whole else min(capacity, needed)
        return self._lay_out({**arrays, "lengths": lengths}, samples, slots, (rows, width))

    def _lay_out(
        self,
        arrays: Mapping[str, np.ndarray],
        samples: tuple[SampleIndex, ...],
        slots: list[Slot],
        shape: tuple[int, int],
    ) -> BertBatch:
        """Write the samples to their slots in `shape` = (rows, columns)."""
        lengths, rows, room = arrays["lengths"].tolist(), shape[0], arrays["tokens"].size
        tokens, types, places = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        documents = np.full(shape, -1, dtype=np.int32)
        for number, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            into = (slot.row, slice(slot.column, slot.column + length))
            tokens[into] = arrays["tokens"][number, :length]
            types[into] = arrays["token_types"][number, :length]
            places[into] = np.arange(length)
            documents[into] = number
        row = np.array([slot.row for slot in slots])
        column = np.array([slot.column for slot in slots])
        keys = None if self.seed is None else sample_keys(self.seed, samples)
        if keys is not None and self.packed:
            # Padding, whose document is -1, gets the last sample's keys; its results are never read.
            keys = keys[documents]

        def tensor(array: np.ndarray) -> Tensor:
            return tensor_of(array, self.device)

        whole = sum(lengths) == tokens.size and len(slots) == rows
        sample, position = np.nonzero(arrays["loss_mask"])
        at_row, at_column = row[sample], column[sample] + position
        wanted = None
        if self.columns.ranks == 1:
            wanted = _wanted(shape, (at_row, at_column), (row, column))
        place = self.columns.places(shape[1])
        masked, first = place[at_column] >= 0, place[column] >= 0
        counts = self.columns.rank == 0
        return BertBatch(
            tensor(self.columns.own(tokens)),
            places=Places(
                positions=tensor(places) if self.packed else None,
                token_types=tensor(self.columns.own(types)),
                documents=None if whole else documents_on(self.device, documents),
                sample_keys=None if keys is None else tensor(keys),
            ),
            targets=MaskedTargets(
                masked=tensor((place[at_column] * rows + at_row)[masked]),
                labels=tensor(arrays["labels"][sample, position][masked]),
                firsts=tensor((place[column] * rows + row)[first]),
                is_random=tensor(arrays["is_random"][first]),
                wanted=None if wanted is None else tensor(wanted),
            ),
            padding=(room - sum(lengths)) * counts,
            room=room * counts,
        )


def _wanted(shape: tuple[int, int], *read: tuple[np.ndarray, np.ndarray]) -> np.ndarray | None:
    """The columns of each row that are read, int64 [r, b]; None if all columns are.

    Args:
        shape: (b, number of columns).
        read: indices (rows, columns) of positions that are read; r is the most in one row, rounded up to a
            multiple of 8.
    """
    unread = np.ones(shape, dtype=bool)
    for places in read:
        unread[places] = False
    count = shape[1] - int(unread.sum(1).min())
    count = -(-count // COLUMNS) * COLUMNS
    return np.argsort(unread, axis=1, kind="stable")[:, :count].T if count < shape[1] else None


def random_samples(
    rng: np.random.Generator, count: int, length: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """Arrays of `count` random samples of uneven lengths, as a `BERTDataset` returns them.

    About 1 / (3 + i) of sample i's tokens are masked, but none of every fifth sample's.
    """
    shape, places = (count, length), np.arange(length)
    lengths = rng.integers(min(4, length), length + 1, count)
    lengths[0] = length
    real = places < lengths[:, None]
    tokens = np.where(real, rng.integers(0, vocab_size, shape), 0)
    share = np.where(np.arange(count) % 5 == 4, 0.0, 1.0 / (3 + np.arange(count)))
    mask = (rng.random(shape) < share[:, None]) & real
    return {
        "tokens": tokens,
        "token_types": (real & (places >= lengths[:, None] // 2)).astype(np.int64),
        "labels": np.where(mask, rng.integers(0, vocab_size, shape), -1),
        "loss_mask": mask.astype(np.float32),
        "lengths": lengths,
        "is_random": rng.integers(0, 2, count),
        "truncated": np.zeros(count, dtype=np.int64),
    }
