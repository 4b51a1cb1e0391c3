"""GPT training samples by best-fit packing: each sample holds several whole documents.

The arrays are those of `GPTDataset`, always with `document_ids`, as the documents of a sample are unrelated.
Positions after the last document are padding: token 0, document -1, no loss. The last token of a document has
no label and no loss. A document longer than a sample continues in another sample; the first token there is
also the last label of the sample before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.build_report import BuildReport
from megazero.data.cache import cached_arrays
from megazero.data.gpt_dataset import GPTSettings, chosen_sequences, refuse_ids
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.packed.packing import Packing, PackingFacts, pack, packing_fault
from megazero.data.range_checks import check_sample_numbers
from megazero.data.shuffle import cyclic_sample
from megazero.errors import DataError

_INDEX_ARRAYS = ("documents", "offsets", "firsts")
_DOCUMENT_SECONDS = 2.5e-6  # to pack a document, measured on one busy core
PADDING_ID = -1
"""The document id of padding."""


class PackedDataset(SampleDataset):
    """Packed samples of one split of one indexed dataset, whose documents are one sequence each.

    Documents are packed once. Every epoch gives each sample once, in an order of its own; neither the packing
    nor the order of an epoch depends on the number of epochs.

    sequence_ids: the split's sequences, a range or int [n]; num_samples: the least number of samples, over as
    many epochs as that takes (None: one epoch); epochs: exactly this many epochs instead. name: the split's
    name. Raises DataError if the split holds no token, or if documents are split into sentences.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_ids: range | np.ndarray,
        num_samples: int | None,
        settings: GPTSettings,
        name: str = "train",
        epochs: int | None = None,
    ):
        self.indexed, self.settings, self.name = indexed, settings, name
        self._ids = sequence_ids
        self._where = f"the {name} split of {indexed.prefix}"
        sizes = indexed.lengths[self._documents]
        self._check(sizes, num_samples, epochs)
        description = {} if settings.cache_dir is None else self._packing_description
        arrays = cached_arrays(
            settings.cache_dir, f"gpt-packed-{name}", description, _INDEX_ARRAYS, self._build, self._fault
        )
        self.packing = Packing(**arrays)
        per_epoch = self.packing.sequences
        self.facts = PackingFacts.of(sizes, settings.sequence_length, per_epoch)
        if epochs is None:
            epochs = 1 if num_samples is None else -(-num_samples // per_epoch)
        self._size = epochs * per_epoch

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, [b, T]. IndexError past the end, DataError for unknown token ids."""
        indices, ends = check_sample_numbers(indices, len(self), self._where), self.settings.ends
        shape, (text, spans) = (len(indices), self.settings.sequence_length), self._text(indices)
        tokens, labels, position_ids = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        with self.indexed.guard.using(lambda: spans):
            stored = self.indexed.tokens
            tokens.flat[text.places] = stored[text.sources]
            labels.flat[text.places] = np.where(text.is_last, 0, stored[text.sources + ~text.is_last])
        refuse_ids(indices, (tokens, labels), self.settings.vocab_size, self._where)
        loss_mask = np.zeros(shape, dtype=np.float32)
        loss_mask.flat[text.places] = ~text.is_last
        if self.indexed.mask is not None:
            loss_mask.flat[text.places] *= self.indexed.mask[text.sources + ~text.is_last] != 0
        if ends.eod_mask_loss:
            loss_mask[tokens == ends.eod_token] = 0.0
        document_ids = np.full(shape, PADDING_ID, dtype=np.int32)
        document_ids.flat[text.places] = text.document_ids
        position_ids[:] = np.arange(shape[1])
        if ends.reset_position_ids:
            position_ids.flat[text.places] -= text.document_starts
        batch: dict[str, np.ndarray] = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }
        if ends.infill is not None:
            documents, begins, counts = self._pieces(indices)
            stops = begins + np.minimum(self.indexed.lengths[documents] - begins, shape[1] + 1)
            epochs = np.repeat(indices // self.packing.sequences, counts)
            pieces = _exclusive_sum(counts), documents, begins, stops, epochs
            ends.infill.rewrite(batch, self.indexed, pieces, end_to_end=False)
        return batch

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies: its documents, and where a document is cut."""
        documents, offsets, _ = self._pieces(np.array([number]))
        pairs = zip(documents.tolist(), offsets.tolist(), strict=True)
        shown = (f"{document} from token {offset}" if offset else str(document) for document, offset in pairs)
        return f"{self.indexed.prefix}: sequences {', '.join(shown)}"

    @property
    def padding_share(self) -> float:
        """Share of the positions of an epoch that hold no token."""
        return self.facts.padding_share

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should read at the start of a run."""
        facts, length = self.facts, self.settings.sequence_length
        return (
            *self.indexed.guard.notes,
            f"{self._where} is packed: {facts.documents:,} documents in {facts.sequences:,} sequences of "
            f"{length:,} tokens; {facts.padding:,} positions ({facts.padding_share:.2%}) are padding, and "
            f"{facts.cut:,} documents are longer than a sequence and are cut.",
        )

    @property
    def description(self) -> dict[str, object]:
        """Everything that the samples and their order depend on, as JSON."""
        infill = self.settings.ends.infill
        filled = {} if infill is None else {"infill": infill.description}
        return {**self._packing_description, "samples": len(self), **filled}

    @property
    def _packing_description(self) -> dict[str, object]:
        """Everything that the packing depends on, as JSON: the key of the index cache."""
        return {
            "kind": "gpt-packed",
            "dataset": self.indexed.fingerprint,
            "sequences": chosen_sequences(self._ids),
            "sequence_length": self.settings.sequence_length,
            "seed": self.settings.seed,
        }

    @property
    def _documents(self) -> np.ndarray:
        ids = self._ids
        return np.arange(ids.start, ids.stop) if isinstance(ids, range) else ids

    def _check(self, sizes: np.ndarray, num_samples: int | None, epochs: int | None) -> None:
        for name, value in (("num_samples", num_samples), ("epochs", epochs)):
            if value is not None and value < 1:
                raise DataError(f"`{name}` must be at least 1, but is {value}.")
        documents, sequences = len(self.indexed.document_index) - 1, len(self.indexed)
        if documents != sequences:
            raise DataError(
                f"`data_path` must have one sequence per document to be packed, but "
                f"{self.indexed.prefix} has {sequences} sequences in {documents} "
                "documents; preprocess the text without `megazero data preprocess "
                "--split-sentences`."
            )
        if not sizes.sum(dtype=np.int64):
            raise DataError(
                f"`tokens` must be at least 1 to be packed, but {self._where} ({len(sizes)} documents) has "
                "none; give more text."
            )

    def _build(self) -> dict[str, np.ndarray]:
        ids = self._documents
        with BuildReport(f"packing of {self._where}", len(ids), len(ids) * _DOCUMENT_SECONDS):
            return vars(pack(self.indexed.lengths, ids, self.settings.sequence_length, self.settings.seed))

    def _fault(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        return packing_fault(arrays, self.indexed.lengths, self._documents, self.settings.sequence_length)

    def _pieces(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of some samples: documents and offsets, int [p] each, and pieces per sample, int [b]."""
        per_epoch, seed = self.packing.sequences, self.settings.seed
        sequences = np.array([cyclic_sample(i, per_epoch, seed) for i in indices.tolist()], dtype=np.int64)
        firsts = self.packing.firsts[sequences]
        counts = self.packing.firsts[sequences + 1] - firsts
        pieces = np.arange(int(counts.sum())) + np.repeat(firsts - _exclusive_sum(counts), counts)
        return self.packing.documents[pieces], self.packing.offsets[pieces].astype(np.int64), counts

    def _text(self, indices: np.ndarray) -> tuple[_Text, tuple[np.ndarray, np.ndarray]]:
        """Where a batch's tokens are, and their first bytes and ends in the `.bin`."""
        # Arrays of pieces are [p], those of tokens [n].
        length, width = self.settings.sequence_length, self.indexed.dtype.itemsize
        documents, offsets, counts = self._pieces(indices)
        rests = self.indexed.lengths[documents] - offsets  # from a piece's start to its document's end
        sizes = np.minimum(rests, length)
        begins = self.indexed.offsets[documents] // width + offsets  # in tokens of the `.bin`
        read_ends = begins + np.minimum(rests, length + 1)  # with the label of the last token
        spans = begins * width, read_ends * width
        rows, firsts = np.repeat(np.arange(len(counts)), counts), np.repeat(_exclusive_sum(counts), counts)
        before = _exclusive_sum(sizes)
        in_row = before - before[firsts]  # where the piece starts in its row
        tokens = np.arange(int(sizes.sum()))
        text = _Text(
            sources=tokens + np.repeat(begins - before, sizes),
            places=tokens + np.repeat(rows * length + in_row - before, sizes),
            is_last=tokens - np.repeat(before, sizes) == np.repeat(rests - 1, sizes),
            document_ids=np.repeat(np.arange(len(sizes)) - firsts, sizes),
            document_starts=np.repeat(in_row, sizes),
        )
        return text, spans


@dataclass(frozen=True)
class _Text:
    """The tokens of a batch, arrays [n] each.

    sources: place in the `.bin`, in tokens; places: place in the flattened batch; is_last: whether the token
    ends its document; document_ids: number of its document in the row; document_starts: where that starts in
    the row.
    """

    sources: np.ndarray
    places: np.ndarray
    is_last: np.ndarray
    document_ids: np.ndarray
    document_starts: np.ndarray


def _exclusive_sum(counts: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.cumsum(counts) - counts
    return sums
