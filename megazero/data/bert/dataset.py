"""BERT training samples from an indexed dataset of sentences, in Megatron-Core's order.

A sample is a dict of numpy arrays: `tokens` int64 [T], masked and padded with [PAD]; `token_types` int64 [T],
1 in segment B and its [SEP]; `labels` int64 [T], the original tokens at the masked positions, -1 elsewhere;
`loss_mask` float32 [T], 1 at the masked positions; and the int64 scalars `lengths` (tokens before the
padding), `is_random` (1 if the segments are swapped) and `truncated`. `batch` returns the same arrays
stacked, [b, T] and [b], and is the fast path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megazero.data.bert.sample import SPECIAL_TOKENS, SampleRecipe, SentenceStore, make_samples
from megazero.data.bert.sample_map import (
    LONGEST_SENTENCE,
    MapPlan,
    build_sample_map,
    count_documents,
    sample_map_fault,
)
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import SampleDataset
from megazero.data.build_report import BuildReport
from megazero.data.cache import cached_arrays
from megazero.data.conversations.mask import refuse_mask
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.prepared import check_prepared, digest_of, read_prepared
from megazero.data.range_checks import check_sample_numbers
from megazero.errors import DataError

_ROW_SECONDS = 200e-9  # to build a row of a sample map, measured on one busy core
_MEASURED = (
    1 << 14
)  # samples whose padding is counted; rows are shuffled, so the first ones are a random subset


@dataclass(frozen=True)
class BERTSettings:
    """The settings that all BERT datasets of a run share.

    sequence_length: T, in tokens, special tokens included. words: the vocabulary. seed: determines order and
    content of the samples. cache_dir: folder of the index cache, None for no cache. mask_prob: share of the
    tokens to predict. short_seq_prob: share of the samples that are made shorter than T. binary_head: whether
    samples have a segment B; half of the samples then have their segments swapped.
    """

    sequence_length: int
    words: WordPieces
    seed: int = 1234
    cache_dir: str | Path | None = None
    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    binary_head: bool = True

    def __post_init__(self) -> None:
        if self.sequence_length < SPECIAL_TOKENS + 2:
            raise DataError(
                f"`seq_length` must be at least {SPECIAL_TOKENS + 2} for BERT, to hold [CLS], two [SEP] and "
                f"two tokens of text, but is {self.sequence_length}."
            )
        if not 0 < self.mask_prob < 1:
            raise DataError(f"`mask_prob` must lie between 0 and 1, but is {self.mask_prob}.")
        if not 0 <= self.short_seq_prob <= 1:
            raise DataError(f"`short_seq_prob` must be from 0 to 1, but is {self.short_seq_prob}.")
        if self.seed < 0:
            raise DataError(f"`seed` must not be negative, but is {self.seed}.")

    @property
    def target(self) -> int:
        """Tokens of text in a full sample."""
        return self.sequence_length - SPECIAL_TOKENS

    @property
    def recipe(self) -> SampleRecipe:
        return SampleRecipe(self.words, self.sequence_length, self.mask_prob, self.binary_head)

    @property
    def masking(self) -> dict[str, object]:
        """The settings that turn sentences into samples, as JSON."""
        return {
            "sequence_length": self.sequence_length,
            "vocabulary": self.words.fingerprint,
            "mask_prob": self.mask_prob,
            "binary_head": self.binary_head,
            "seed": self.seed,
        }


class BERTDataset(SampleDataset):
    """Samples of one split of one indexed dataset.

    documents: the split's documents; num_samples: the least number of samples, over as many epochs as that
    takes (None: one epoch); epochs: exactly this many epochs instead. name: the split's name, for messages
    and cache files. prepared: path of a .npy file with the sample map; None to build the map. Raises
    DataError if no document gives a sample, or if the file is not a map of these documents.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int | None,
        settings: BERTSettings,
        name: str = "train",
        epochs: int | None = None,
        prepared: str | None = None,
    ):
        refuse_mask(indexed.prefix, indexed.mask)
        self.indexed = indexed
        self.settings = settings
        self.name = name
        self.plan = MapPlan(
            num_samples if epochs is None else None,
            1 if epochs is None else epochs,
            settings.target,
            2 if settings.binary_head else 1,
            settings.short_seq_prob,
            settings.seed,
        )
        self._documents = documents
        self._boundaries = np.array(indexed.document_index[documents.start : documents.stop + 1])
        self.counts = count_documents(indexed.lengths, self._boundaries, self.plan.min_sentences)
        if not self.counts.used:
            raise self._nothing_to_use()
        self._is_prepared = prepared is not None
        if prepared is not None:
            self.rows = read_prepared(prepared)
            check_prepared(self._fault({"rows": self.rows}), len(self.rows), num_samples, indexed.prefix)
        else:
            description = {} if settings.cache_dir is None else self._map_description
            arrays = cached_arrays(
                settings.cache_dir, f"bert-{name}", description, ("rows",), self._build, self._fault
            )
            self.rows = arrays["rows"]
        self._store = SentenceStore(indexed.tokens, indexed.lengths, indexed.offsets)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked. IndexError past the end, DataError for unknown token ids."""
        indices = check_sample_numbers(indices, len(self), f"the {self.name} split of {self.indexed.prefix}")
        rows = self.rows[indices].astype(np.int64)
        seeds = (indices + self.settings.seed % (1 << 32)) % (1 << 32)
        with self.indexed.guard.using(lambda: self._spans(rows)):
            batch, lowest, highest = make_samples(self._store, rows, seeds, self.settings.recipe)
        if indices.size and (lowest < 0 or highest >= self.settings.words.size):
            self._refuse_ids(indices, batch)
        return batch

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies: its first and its last sentence."""
        first, end = self.rows[number, :2].tolist()
        return f"{self.indexed.prefix}: sentences {first} to {end - 1}"

    @property
    def description(self) -> dict[str, object]:
        """Everything that the samples and their order depend on, as JSON."""
        return {**self._map_description, **self.settings.masking}

    @cached_property
    def padding_share(self) -> float:
        """Share of the positions that hold padding, measured on some thousand samples."""
        lengths, target = self.indexed.lengths, self.settings.target
        special = SPECIAL_TOKENS if self.settings.binary_head else SPECIAL_TOKENS - 1
        measured = self.rows[:_MEASURED].tolist()
        texts = (min(int(lengths[first:end].sum(dtype=np.int64)), t) for first, end, t in measured)
        padding: float = 1.0 - (sum(texts) / len(measured) + special) / (target + SPECIAL_TOKENS)
        return padding

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should read at the start of a run."""
        where = f"{self.name} split of {self.indexed.prefix}"
        padding = f"{self.padding_share:.1%} of the positions of the {where} are padding."
        out, total = self.counts.left_out, len(self._documents)
        left_out = f"{out} of the {total} documents of the {where} are left out: {self.counts.reasons}."
        return (*self.indexed.guard.notes, *((left_out, padding) if out else (padding,)))

    @property
    def _map_description(self) -> dict[str, object]:
        """Everything that the sample map depends on, as JSON: the key of the index cache."""
        plan = self.plan
        return {
            "kind": "bert",
            "dataset": self.indexed.fingerprint,
            "documents": f"{self._documents.start}..{self._documents.stop}",
            "target": plan.target,
            "min_sentences": plan.min_sentences,
            "short_ratio": plan.short_ratio,
            "epochs": plan.epochs,
            "num_samples": plan.num_samples,
            "seed": plan.seed,
            **({"prepared": self._map_digest} if self._is_prepared else {}),
        }

    @cached_property
    def _map_digest(self) -> str:
        return digest_of(self.rows)

    def _build(self) -> dict[str, np.ndarray]:
        lengths, plan = self.indexed.lengths, self.plan
        text = lengths[int(self._boundaries[0]) : int(self._boundaries[-1])].sum(dtype=np.int64)
        samples = plan.num_samples or plan.epochs * int(text) // plan.target + 1
        what = f"sample map of the {self.name} split of {self.indexed.prefix}"
        with BuildReport(what, samples, samples * _ROW_SECONDS):
            return {"rows": build_sample_map(lengths, self._boundaries, plan)}

    def _spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First byte and end in the `.bin`, int64 [b] each, of the samples in `rows` of the map."""
        offsets, first, last = self.indexed.offsets, rows[:, 0], rows[:, 1] - 1
        sizes = self.indexed.lengths[last].astype(np.int64) * self.indexed.dtype.itemsize
        return offsets[first], offsets[last] + sizes

    def _fault(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        return sample_map_fault(arrays["rows"], self.indexed.lengths, self._boundaries, self.plan)

    def _nothing_to_use(self) -> DataError:
        indexed, least = self.indexed, self.plan.min_sentences
        if least > 1 and int(np.diff(indexed.document_index).max()) <= 1:
            return DataError(
                f"`documents` of {indexed.prefix} must be split into sentences, but each is one sequence; "
                "train with `--bert-no-binary-head`, or preprocess the text with `megazero data preprocess "
                "--split-sentences`."
            )
        return DataError(
            f"`{self.name}` split of {indexed.prefix} must have a document of at least {least} sentence(s), "
            f"none of them longer than {LONGEST_SENTENCE} tokens, but none of its {self.counts.left_out} is: "
            f"{self.counts.reasons}; give more text, or a larger share of it."
        )

    def _refuse_ids(self, indices: np.ndarray, batch: dict[str, np.ndarray]) -> None:
        size = self.settings.words.size
        text = np.where(batch["loss_mask"] > 0, batch["labels"], batch["tokens"])
        row, column = np.argwhere((text < 0) | (text >= size))[0]
        raise DataError(
            f"`token id` must be in 0..{size - 1}, but is {int(text[row, column])} in sample "
            f"{int(indices[row])} of the {self.name} split of {self.indexed.prefix}; use the tokenizer the "
            "dataset was made with."
        )
