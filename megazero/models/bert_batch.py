"""One micro-batch of BERT samples: without the columns that only pad, and packed if that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
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
    RowPlace,
    column_multiple,
    documents_on,
    tensor_of,
)
from megazero.models.packing import Slot, pack
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys


@dataclass(frozen=True)
class MaskedTargets:
    """The tokens and samples that BERT's heads read, and what they learn of them.

    Attributes:
        masked: int64 [m], the places of the masked tokens in hidden states [s, b, h] whose first two dims are
            flattened.
        labels: int64 [m], the ids that they had.
        firsts: int64 [n], the places of the samples' first tokens.
        is_random: int64 [n], 1 where a sample's segments are not in order.
        wanted: int64 [r, b], the columns of each row that the heads read, those of its masked tokens and of
            its samples' first ones, and others where a row has fewer than r; None: all.
    """

    masked: Tensor
    labels: Tensor
    firsts: Tensor
    is_random: Tensor
    wanted: Tensor | None = None


@dataclass(frozen=True)
class BertBatch(MicroBatch):
    """A micro-batch of `n` samples in `b` rows of `s` tokens; without packing, `b` is `n`.

    Token types are segments. Positions are given if samples share rows; document ids say then which sample of
    the row a token belongs to, and -1 stands for padding. Packed samples share the keys of the first one in
    their row, at other positions.

    Attributes:
        targets: what the heads read and learn.
        padding: number of positions by which the samples fall short of the sequence length.
        room: number of positions that they would have at that length.
    """

    of_sequences = frozenset({"micro_batches"})

    targets: MaskedTargets
    padding: int
    room: int

    def places_among_wanted(self, places: Tensor) -> Tensor:
        """The places in hidden states [r, b, h] of wanted columns, given those in [s, b, h]."""
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

        The share of padding is that of the data, whatever is left out or packed here: it does not depend on
        which samples share a micro-batch.
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
class BertCollate:
    """Turns the arrays of a `BERTDataset` into a `BertBatch`.

    Columns that hold nothing but padding are left out, up to a multiple of 8 (and of the ranks that
    share a sequence), so that nobody computes them.

    Attributes:
        vocab_size: number of ids that tokens and labels may have.
        device: the device of the tensors.
        multiple: the number of columns is a multiple of this.
        packed: whether samples share rows.
        seed: seed of the dropout streams; None for evaluation, which drops nothing.
        columns: the columns of this rank. What is read of a sample belongs to the rank that has its column,
            and what is counted of it to the first.
        whole: whether all columns stay in training, since random-LTD chooses among them, and what it chooses
            for a sample must not depend on who shares its micro-batch.
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
        """The collate function for a run's configuration."""
        whole, multiple = config.skipping.random_ltd and seed is not None, column_multiple(config)
        columns, packed = Columns.of(config.parallel, context), config.data.bert_pack
        return cls(vocab_size, context.device, multiple, packed, seed, whole, columns)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[RowPlace, ...]) -> BertBatch:
        """Make a batch; `samples` are the places of the samples in the training order, one per row.

        Nothing waits for the device.

        Raises:
            DataError: a token or label lies outside the vocabulary.
        """
        mask, capacity = arrays["loss_mask"] != 0, arrays["tokens"].shape[1]
        check_token_ids({"tokens": arrays["tokens"], "labels": arrays["labels"][mask]}, self.vocab_size)
        # Of samples that were cut, as many tokens as there are columns.
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
        samples: tuple[RowPlace, ...],
        slots: list[Slot],
        shape: tuple[int, int],
    ) -> BertBatch:
        """The samples at their slots in `shape` = (rows, columns)."""
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
            # Padding, whose document is -1, has the last sample's keys; nobody reads what becomes of it.
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
    """The columns of each of the b rows that something reads, int64 [r, b]; None if these are all columns.

    Args:
        shape: (b, number of columns).
        read: places that are read, as (rows, columns); r is the most of a row, rounded up to a multiple of 8.
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
    """Arrays of `count` random samples of uneven lengths, as a `BERTDataset` gives them.

    About a third of the first sample's tokens are masked, fewer of the later ones', and none of every fifth.
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
