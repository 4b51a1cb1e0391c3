"""T5 training samples from an indexed dataset of sentences or documents, in Megatron-Core's order.

A sample has the arrays of `PairShape.arrays`. The encoder reads the text with a sentinel in place of each
span that was cut out; the decoder reads and predicts these spans. `batch` returns the arrays stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.mock import MockBERTDataset
from megazero.data.range_checks import check_sample_numbers
from megazero.data.t5.spans import Arrays, PairShape, cut_spans
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.errors import DataError

_MEASURED = (
    256  # samples whose padding is counted; samples are shuffled, so the first ones are a random subset
)
SPECIAL_TOKENS = 2  # as Megatron-Core counts: the token that begins a text and the token that ends it


@dataclass(frozen=True)
class T5Settings(BERTSettings):
    """The settings that all T5 datasets of a run share: BERT's, and the decoder's.

    decoder_length: T, the columns of the decoder's arrays. Raises DataError if a sample may have more spans
    than there are sentinels.
    """

    vocabulary: SpanVocabulary = field(kw_only=True)
    decoder_length: int = field(kw_only=True)
    binary_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most_spans, sentinels = max(1, int(self.mask_prob * self.target)), len(self.vocabulary.sentinels)
        if sentinels < most_spans:
            raise DataError(
                f"`vocab_extra_ids` must be at least {most_spans} for T5, as that many spans may be cut out "
                f"of a sample, but the vocabulary has {sentinels} sentinels; add some, or set a shorter "
                "`--encoder-seq-length` or a smaller `--mask-prob`."
            )

    @property
    def target(self) -> int:
        """Tokens of text in a full sample."""
        return self.sequence_length - SPECIAL_TOKENS

    @property
    def shape(self) -> PairShape:
        return PairShape(self.sequence_length, self.decoder_length, self.words.pad)

    @property
    def masking(self) -> dict[str, object]:
        """The settings that turn sentences into samples, as JSON."""
        ids = [self.vocabulary.start, self.vocabulary.end, *self.vocabulary.sentinels]
        return {**super().masking, "kind": "t5", "decoder_length": self.decoder_length, "ids": ids}

    def samples(self, texts: Sequence[tuple[list[int], int]], seeds: Sequence[int]) -> Arrays:
        """Make the arrays of a batch. texts: tokens and target length of each sample; seeds: of its draws."""
        vocabulary, shape = self.vocabulary, self.shape
        pairs = [
            cut_spans(tokens[:target], target, self.mask_prob, vocabulary, np.random.RandomState(seed))
            for (tokens, target), seed in zip(texts, seeds, strict=True)
        ]
        arrays = shape.arrays(pairs, vocabulary.start)
        arrays["truncated"] |= [len(tokens) > target for tokens, target in texts]
        return arrays


class T5Dataset(BERTDataset):
    """Samples of one split of one indexed dataset; arguments and errors as in `BERTDataset`."""

    settings: T5Settings

    @cached_property
    def padding_share(self) -> float:
        """Share of the encoder's and decoder's positions that hold padding, measured on some samples."""
        batch, settings = self.batch(range(min(len(self), _MEASURED))), self.settings
        tokens = batch["lengths"].sum() + batch["decoder_lengths"].sum()
        positions = len(batch["lengths"]) * (settings.sequence_length + settings.decoder_length)
        return 1.0 - float(tokens) / positions

    def batch(self, indices: Sequence[int] | np.ndarray) -> Arrays:
        """The samples `indices` stacked. IndexError past the end, DataError for unknown token ids."""
        numbers = check_sample_numbers(indices, len(self), f"the {self.name} split of {self.indexed.prefix}")
        rows = self.rows[numbers].astype(np.int64)
        texts, rest = [], rows.tolist()
        with self.indexed.guard.using(lambda: self._spans(rows)):
            read = [[t for number in range(a, b) for t in self._store.sentence(number)] for a, b, _ in rest]
        for number, tokens, (_, _, target) in zip(numbers.tolist(), read, rest, strict=True):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.settings.vocabulary.size:
                raise DataError(
                    f"`token id` must be in 0..{self.settings.vocabulary.size - 1}, but those of sample "
                    f"{number} of the {self.name} split of {self.indexed.prefix} span "
                    f"{min(tokens)}..{max(tokens)}; use the tokenizer the dataset was made with."
                )
            texts.append((tokens, target))
        seeds = (numbers + self.settings.seed % (1 << 32)) % (1 << 32)
        return self.settings.samples(texts, seeds.tolist())


class MockT5Dataset(MockBERTDataset):
    """Random text with the arrays of `T5Dataset`."""

    settings: T5Settings

    def batch(self, indices: Sequence[int] | np.ndarray) -> Arrays:
        """The samples `indices` stacked. IndexError past the end."""
        plain, texts, seeds = self.settings.vocabulary.plain, [], []
        for index in check_sample_numbers(indices, len(self), "mock data").tolist():
            random = self._random(index)
            target, _ = self._shape(random)
            texts.append((plain[random.integers(0, plain.size, target)].tolist(), target))
            seeds.append((index + self._key) % (1 << 32))
        return self.settings.samples(texts, seeds)
