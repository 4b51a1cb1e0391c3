"""GPT training samples by best-fit packing: whole documents beside one another in each sample.

The arrays are those of `GPTDataset`, with `document_ids` always, as the documents of a sample have nothing to
do with each other. Positions behind the last document are padding: token 0, document -1, no loss. The last
token of a document has no label and no loss either. A document that is longer than a sample goes on in
another, and there its first token is a label of the sample before.
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
from megazero.data.sample_numbers import sample_numbers
from megazero.data.shuffle import cyclic_sample
from megazero.errors import DataError

_INDEX_ARRAYS = ("documents", "offsets", "firsts")
_DOCUMENT_SECONDS = 2.5e-6  # about what a document takes on one busy core
PADDING_ID = -1
"""The document of padding."""


class PackedDataset(SampleDataset):
    """Packed samples of one split of one indexed dataset, whose documents are one sequence each.

    Documents are packed once. Every epoch has the same samples, each once, in an order of its own, and the
    packing and the order of an epoch do not depend on how many epochs there are.

    sequence_ids: the split's sequences, a range or int [n]; num_samples: the least number of samples, over as
    many epochs as it takes (None: one epoch); epochs: exactly this many epochs instead. name: the split's
    name. Raises DataError if the split holds no token, or documents are split into sentences.
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
        """The samples `indices` stacked, [b, T]. IndexError past the end, DataError for foreign ids."""
        indices, ends = sample_numbers(indices, len(self), self._where), self.settings.ends
        shape, text = (len(indices), self.settings.sequence_length), self._text(indices)
        tokens, labels, position_ids = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        stored = self.indexed.tokens
        tokens.flat[text.to] = stored[text.at]
        labels.flat[text.to] = np.where(text.last, 0, stored[text.at + ~text.last])
        refuse_ids(indices, (tokens, labels), self.settings.vocab_size, self._where)
        loss_mask = np.zeros(shape, dtype=np.float32)
        loss_mask.flat[text.to] = ~text.last
        if ends.eod_mask_loss:
            loss_mask[tokens == ends.eod_token] = 0.0
        document_ids = np.full(shape, PADDING_ID, dtype=np.int32)
        document_ids.flat[text.to] = text.number
        position_ids[:] = np.arange(shape[1])
        if ends.reset_position_ids:
            position_ids.flat[text.to] -= text.before
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }

    def whereabouts(self, number: int) -> str:
        """The place of a sample's text: its documents, with where they are cut."""
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
        """Everything that the order and content of the samples depend on, as JSON: the key of caches."""
        return {**self._packing_description, "samples": len(self)}

    @property
    def _packing_description(self) -> dict[str, object]:
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
                "documents; preprocess the text without `preprocess_data.py "
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
        """Documents and offsets of the pieces in these samples, int [p] each, and their numbers, int [b]."""
        per_epoch, seed = self.packing.sequences, self.settings.seed
        sequences = np.array([cyclic_sample(i, per_epoch, seed) for i in indices.tolist()], dtype=np.int64)
        firsts = self.packing.firsts[sequences]
        counts = self.packing.firsts[sequences + 1] - firsts
        pieces = np.arange(int(counts.sum())) + np.repeat(firsts - _sum_before(counts), counts)
        return self.packing.documents[pieces], self.packing.offsets[pieces].astype(np.int64), counts

    def _text(self, indices: np.ndarray) -> _Text:
        length = self.settings.sequence_length
        documents, offsets, counts = self._pieces(indices)
        rests = self.indexed.lengths[documents] - offsets  # int64 [p]: tokens from here to the document's end
        sizes = np.minimum(rests, length)
        begins = self.indexed.offsets[documents] // self.indexed.dtype.itemsize + offsets
        self.indexed.guard.before_use(lambda: self._spans(begins, np.minimum(rests, length + 1)))
        rows, firsts = np.repeat(np.arange(len(counts)), counts), np.repeat(_sum_before(counts), counts)
        before = _sum_before(sizes)
        in_row = before - before[firsts]
        number = np.arange(len(sizes)) - firsts
        tokens = np.arange(int(sizes.sum()))

        def of_tokens(values: np.ndarray) -> np.ndarray:
            return np.repeat(values, sizes)

        return _Text(
            at=tokens + of_tokens(begins - before),
            to=tokens + of_tokens(rows * length + in_row - before),
            last=tokens - of_tokens(before) == of_tokens(rests - 1),
            number=of_tokens(number),
            before=of_tokens(in_row),
        )

    def _spans(self, begins: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First byte and end in the `.bin`, int64 [p] each, of so many tokens from `begins`."""
        width = self.indexed.dtype.itemsize
        return begins * width, (begins + sizes) * width


@dataclass(frozen=True)
class _Text:
    """The tokens of a batch, arrays [n] each.

    at: in the `.bin`; to: in the flattened batch; last: of its document; number: of its piece in the row;
    before: tokens of the pieces before it in the row.
    """

    at: np.ndarray
    to: np.ndarray
    last: np.ndarray
    number: np.ndarray
    before: np.ndarray


def _sum_before(counts: np.ndarray) -> np.ndarray:
    """The sum of the counts before each."""
    total: np.ndarray = np.cumsum(counts) - counts
    return total
