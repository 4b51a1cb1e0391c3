"""GPT training samples from an indexed dataset, in Megatron-Core's order.

A sample is a dict of numpy arrays, [T] each: `tokens` and `labels` int64 (the labels are the next tokens),
`loss_mask` float32, `position_ids` int64, and, with `reset_attention_mask`, `document_ids` int32: a token
attends only to earlier tokens with the same document id. The [T, T] mask is left to the layers, which need
none for plain causal attention. `batch` returns the same arrays stacked, [b, T], and is the fast path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.build_report import BuildReport
from megazero.data.cache import cached_arrays
from megazero.data.computed_order import ComputedOrder, computed_orders
from megazero.data.conversations.mask import label_mask
from megazero.data.fim import Infill, Pieces
from megazero.data.index_build import (
    GPTIndex,
    SamplePlan,
    build_gpt_index,
    build_seconds,
    gather_reference,
    plan_samples,
    shuffled_bytes,
)
from megazero.data.index_check import gpt_index_fault
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.native import NATIVE
from megazero.data.prepared import check_prepared, digest_of, prepared_index
from megazero.data.range_checks import check_sample_numbers
from megazero.errors import DataError

_INDEX_ARRAYS = ("document_index", "sample_index", "shuffle_index")


@dataclass(frozen=True)
class DocumentEnds:
    """The effects of the end of a document inside a sample.

    eod_token: the id that ends a document. reset_position_ids: positions restart at 0 after it;
    reset_attention_mask: samples have `document_ids`; eod_mask_loss: no loss where the input is this token.
    infill: rearranges documents up to their ends for fill-in-the-middle.
    Raises DataError for a flag without the token.
    """

    eod_token: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    infill: Infill | None = None

    def __post_init__(self) -> None:
        flags = [
            n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, n)
        ]
        if flags and self.eod_token is None:
            raise DataError(f"`eod_token` must be given for {', '.join(flags)}, but is None; name the token.")


@dataclass(frozen=True)
class GPTSettings:
    """The settings that all GPT datasets of a run share.

    sequence_length: T, in tokens. seed: determines the order of documents and samples. cache_dir: folder of
    the index cache, None for no cache. vocab_size: ids at or above it are an error; None turns the check off.
    add_extra_token: samples read T + 1 tokens, so that the last label is known; without it, samples do not
    overlap and the last label is masked. index_memory_gib: the most memory in which documents and samples are
    shuffled, in GiB; where they need more, their orders are computed.
    """

    sequence_length: int
    seed: int = 1234
    cache_dir: str | Path | None = None
    vocab_size: int | None = None
    ends: DocumentEnds = DocumentEnds()
    add_extra_token: bool = True
    index_memory_gib: float = 64.0

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DataError(f"`sequence_length` must be at least 1, but is {self.sequence_length}.")

    @property
    def extra(self) -> int:
        return int(self.add_extra_token)


class GPTDataset(SampleDataset):
    """Samples of one split of one indexed dataset.

    sequence_ids: the split's sequences, a range or int [n]; num_samples: the least number of samples, over
    as many epochs as that takes (None: one epoch); epochs: exactly this many epochs instead. name: the
    split's name, for messages and cache files. prepared: paths of .npy files with the index; None to build
    it. Raises DataError if the split holds too few tokens for one sample.
    """

    padding_share = 0.0  # every sample is full

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_ids: range | np.ndarray,
        num_samples: int | None,
        settings: GPTSettings,
        name: str = "train",
        epochs: int | None = None,
        prepared: Sequence[str] | None = None,
    ):
        self.indexed = indexed
        self.settings = settings
        self.name = name
        self._ids = sequence_ids
        self._is_prepared = prepared is not None
        if prepared is not None:
            self.index, epochs = prepared_index(prepared, len(sequence_ids), indexed.prefix)
            self.plan = self._plan(None, epochs)
            fault = gpt_index_fault(self.index, indexed.lengths, sequence_ids, self.plan)
            check_prepared(fault, len(self), num_samples, indexed.prefix)
        else:
            self.plan = self._plan(num_samples, epochs)
            self.index = self._cached_index()

    def __len__(self) -> int:
        return self.plan.samples

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, [b, T]. IndexError past the end, DataError for unknown token ids."""
        indices = check_sample_numbers(indices, len(self), f"the {self.name} split of {self.indexed.prefix}")
        tokens, labels = self._gather(indices)
        batch = finish_batch(tokens, labels, self.settings)
        infill, mask = self.settings.ends.infill, self.indexed.mask
        if infill is None and mask is None:
            return batch
        numbers = self.index.shuffle_index[indices].astype(np.int64)
        if infill is not None:
            infill.rewrite(batch, self.indexed, self._pieces(numbers), end_to_end=True)
        elif mask is not None:
            begins, ends = (place // self.indexed.dtype.itemsize for place in self._spans(numbers))
            batch["loss_mask"] *= label_mask(mask, begins, ends, tokens.shape)
        return batch

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should read at the start of a run."""
        if not self.is_computed:
            return self.indexed.guard.notes
        return (
            *self.indexed.guard.notes,
            f"the {self.name} split of {self.indexed.prefix} has a computed order: Megatron's would take "
            f"more memory than --index-memory-gib {self.settings.index_memory_gib:g}.",
        )

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies: its first token and its last, by sequence and offset."""
        row = int(self.index.shuffle_index[number])
        (first, begin), (last, end) = self.index.sample_index[row : row + 2].tolist()
        first, last = (int(self.index.document_index[place]) for place in (first, last))
        return f"{self.indexed.prefix}: sequence {first}, token {begin}, to sequence {last}, token {end}"

    @property
    def description(self) -> dict[str, object]:
        """Everything that the samples and their order depend on, as JSON."""
        infill = self.settings.ends.infill
        return {**self._index_description, **({} if infill is None else {"infill": infill.description})}

    @property
    def _index_description(self) -> dict[str, object]:
        """Everything that the index depends on, as JSON: the key of the index cache."""
        plan = self.plan
        return {
            "kind": "gpt",
            "dataset": self.indexed.fingerprint,
            "sequences": chosen_sequences(self._ids),
            "sequence_length": plan.sequence_length,
            "extra": plan.extra,
            "epochs": plan.epochs,
            "samples": plan.samples,
            "separate_last": plan.separate_last,
            "seed": self.settings.seed,
            **({"prepared": self._index_digest} if self._is_prepared else {}),
            **({"order": "computed"} if self.is_computed else {}),
        }

    @cached_property
    def _index_digest(self) -> str:
        return digest_of(*vars(self.index).values())

    def _plan(self, num_samples: int | None, epochs: int | None) -> SamplePlan:
        lengths, ids = self.indexed.lengths, self._ids
        chosen = lengths[ids.start : ids.stop] if isinstance(ids, range) else lengths[ids]
        tokens = int(chosen.sum(dtype=np.int64))
        try:
            return plan_samples(
                tokens, self.settings.sequence_length, num_samples, epochs, self.settings.extra
            )
        except DataError as error:
            raise DataError(
                f"{self.name} split of {self.indexed.prefix} ({len(ids)} sequences): {error}"
            ) from error

    @property
    def is_computed(self) -> bool:
        """Whether the order is computed, as Megatron's takes more memory than the settings allow."""
        most = self.settings.index_memory_gib * 2**30
        return not self._is_prepared and shuffled_bytes(self.plan, len(self._ids)) > most

    def _cached_index(self) -> GPTIndex:
        settings, ids, plan, orders = self.settings, self._ids, self.plan, None
        if self.is_computed:
            tokens, length = plan.tokens_per_epoch, plan.sequence_length
            orders = computed_orders(
                settings.seed, plan.epochs, ids, (plan.samples, tokens, length, plan.extra)
            )
        names = _INDEX_ARRAYS if orders is None else ("sample_index",)

        def index_of(arrays: Mapping[str, np.ndarray]) -> GPTIndex:
            documents, samples = orders or (arrays["document_index"], arrays["shuffle_index"])
            return GPTIndex(documents, arrays["sample_index"], samples)

        def build() -> dict[str, np.ndarray]:
            what = f"index of the {self.name} split of {self.indexed.prefix}"
            with BuildReport(what, plan.samples, seconds) as report:
                index = build_gpt_index(
                    self.indexed.lengths, ids, plan, settings.seed, orders, settings.cache_dir, report.step
                )
            return {name: array for name, array in vars(index).items() if name in names}

        def fault(arrays: Mapping[str, np.ndarray]) -> str | None:
            return gpt_index_fault(index_of(arrays), self.indexed.lengths, ids, plan)

        # The description hashes the dataset, which only a cache needs.
        description = {} if settings.cache_dir is None else self._index_description
        name, seconds = f"gpt-{self.name}", build_seconds(plan, len(ids))
        return index_of(cached_arrays(settings.cache_dir, name, description, names, build, fault, seconds))

    def _gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = self.index.shuffle_index[indices].astype(np.int64)
        starts = self.index.sample_index[numbers].astype(np.int64)
        length, extra = self.plan.sequence_length, self.plan.extra
        documents = self.index.document_index
        if isinstance(documents, ComputedOrder):
            starts[:, 0], documents, *_ = self._pieces(numbers)
        tables = (self.indexed.lengths, self.indexed.offsets, documents)
        with self.indexed.guard.using(lambda: self._spans(numbers)):
            if NATIVE is None:
                gathered = gather_reference(self.indexed.tokens, tables, starts, length, extra)
            else:
                gathered = NATIVE.gather(self.indexed.tokens, *tables, starts, length, extra)
        tokens, labels, lowest, highest = gathered
        limit = self.settings.vocab_size
        if indices.size and (lowest < 0 or (limit is not None and highest >= limit)):
            refuse_ids(indices, (tokens, labels), limit, f"the {self.name} split of {self.indexed.prefix}")
        return tokens, labels

    def _pieces(self, numbers: np.ndarray) -> Pieces:
        """The pieces of sequences in some samples, [n] each, sample after sample.

        numbers: int64 [b], places in the sample index. Returns the first piece of each sample, [b]; the
        sequences, begins and ends (with the last label) of the pieces, and their places in the order.
        """
        starts = self.index.sample_index[numbers].astype(np.int64)  # [b, 2]: place in `documents`, token
        stops = self.index.sample_index[numbers + 1].astype(np.int64)
        counts = stops[:, 0] - starts[:, 0] + 1
        firsts = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(starts[:, 0] - firsts, counts)
        sequences = self.index.document_index[places]
        begins, ends = np.zeros(places.size, dtype=np.int64), self.indexed.lengths[sequences].astype(np.int64)
        begins[firsts] = starts[:, 1]
        ends[firsts + counts - 1] = stops[:, 1] + self.plan.extra
        return firsts, sequences, begins, ends, places

    def _spans(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First byte and end in the `.bin`, int64 [n] each, of the pieces of some samples."""
        _, sequences, begins, ends, _ = self._pieces(numbers)
        offsets, size = self.indexed.offsets[sequences], self.indexed.dtype.itemsize
        return offsets + begins * size, offsets + ends * size


def refuse_ids(indices: np.ndarray, texts: Sequence[np.ndarray], limit: int | None, where: str) -> None:
    """Raise DataError for the first id outside 0..limit-1 in `texts`, int64 [b, T] each."""
    limit = limit or np.iinfo(np.int64).max
    for ids in texts:
        wrong = np.argwhere((ids < 0) | (ids >= limit))
        if len(wrong):
            row, column = wrong[0]
            raise DataError(
                f"`token id` must be in 0..{limit - 1}, but is {int(ids[row, column])} in sample "
                f"{int(indices[row])} of {where}; use the tokenizer the dataset was made with."
            )


def chosen_sequences(ids: range | np.ndarray) -> str:
    """A short text that identifies the sequences of a split: their range, or a hash of the ids int [n]."""
    if isinstance(ids, range):
        return f"{ids.start}..{ids.stop}"
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i8").data, digest_size=16).hexdigest()


def finish_batch(tokens: np.ndarray, labels: np.ndarray, settings: GPTSettings) -> dict[str, np.ndarray]:
    """Add loss mask, position ids and document ids to `tokens` and `labels`, int64 [b, T]."""
    shape, ends = tokens.shape, settings.ends
    loss_mask = np.ones(shape, dtype=np.float32)
    if not settings.add_extra_token:
        loss_mask[:, -1] = 0.0
    if ends.eod_mask_loss:
        loss_mask[tokens == ends.eod_token] = 0.0
    places = np.arange(shape[1], dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    position_ids[:] = places
    batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    if ends.reset_position_ids or ends.reset_attention_mask:
        # A document starts one after an EOD; the EOD itself still belongs to the document it ends.
        starts = np.zeros(shape, dtype=bool)
        starts[:, 1:] = tokens[:, :-1] == ends.eod_token
        if ends.reset_position_ids:
            position_ids -= np.maximum.accumulate(np.where(starts, places, 0), axis=1)
        if ends.reset_attention_mask:
            batch["document_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
    return batch
