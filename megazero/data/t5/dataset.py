"""T5 training samples from an indexed dataset of sentences or documents, in Megatron-Core's order.

A sample has the arrays of `PairShape.arrays`: the encoder's text, with sentinels in the place of the spans
that were cut out of it, and these spans as the decoder's. `batch` gives them stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.sample_numbers import sample_numbers
from megazero.data.t5.spans import Arrays, PairShape, cut_spans
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.errors import DataError

_MEASURED = 256  # samples; they are shuffled, so the first are random ones
SPECIAL_TOKENS = 2  # as Megatron-Core counts: one that begins and one that ends a text


@dataclass(frozen=True)
class T5Settings(BERTSettings):
    """The settings that all T5 datasets of a run share; those of BERT's that mean something here.

    vocabulary: the ids; decoder_length: T, the columns of the decoder's arrays. Raises DataError if there may
    be more spans than sentinels.
    """

    vocabulary: SpanVocabulary = field(kw_only=True)
    decoder_length: int = field(kw_only=True)
    binary_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most, given = max(1, int(self.mask_prob * self.target)), len(self.vocabulary.sentinels)
        if given < most:
            raise DataError(
                f"`vocab_extra_ids` must be at least {most} for T5, as that many spans may be cut out of a "
                f"sample, but the vocabulary has {given} sentinels; add some, or set a shorter "
                "`--encoder-seq-length` or a smaller `--mask-prob`."
            )

    @property
    def target(self) -> int:
        """Tokens of text in a full sample."""
        return self.sequence_length - SPECIAL_TOKENS

    @property
    def shape(self) -> PairShape:
        """The shape of a sample's arrays."""
        return PairShape(self.sequence_length, self.decoder_length, self.words.pad)

    @property
    def masking(self) -> dict[str, object]:
        """The settings that turn sentences into samples, as JSON."""
        ids = [self.vocabulary.start, self.vocabulary.end, *self.vocabulary.sentinels]
        return {**super().masking, "kind": "t5", "decoder_length": self.decoder_length, "ids": ids}

    def samples(self, texts: Sequence[tuple[list[int], int]], seeds: Sequence[int]) -> Arrays:
        """The arrays of samples: the tokens and the target length of each, and the seed of what it draws."""
        vocabulary, shape = self.vocabulary, self.shape
        pairs = [
            cut_spans(tokens[:target], target, self.mask_prob, vocabulary, np.random.RandomState(seed))
            for (tokens, target), seed in zip(texts, seeds, strict=True)
        ]
        arrays = shape.arrays(pairs, vocabulary.start)
        arrays["truncated"] |= [len(tokens) > target for tokens, target in texts]
        return arrays


class T5Dataset(BERTDataset):
    """Samples of one split of one indexed dataset; arguments and errors are those of `BERTDataset`."""

    settings: T5Settings

    @cached_property
    def padding_share(self) -> float:
        """Share of the positions of both texts that hold padding, from some hundred random samples."""
        sample, settings = self.batch(range(min(len(self), _MEASURED))), self.settings
        held = sample["lengths"].sum() + sample["decoder_lengths"].sum()
        room = len(sample["lengths"]) * (settings.sequence_length + settings.decoder_length)
        return 1.0 - float(held) / room

    def batch(self, indices: Sequence[int] | np.ndarray) -> Arrays:
        """The samples `indices` stacked. IndexError past the end, DataError for foreign ids."""
        numbers = sample_numbers(indices, len(self), f"the {self.name} split of {self.indexed.prefix}")
        rows = self.rows[numbers].astype(np.int64)
        self.indexed.guard.before_use(lambda: self._spans(rows))
        texts = []
        for number, (first, end, target) in zip(numbers.tolist(), rows.tolist(), strict=True):
            tokens = [token for sentence in range(first, end) for token in self._store.sentence(sentence)]
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.settings.vocabulary.size:
                raise DataError(
                    f"`token id` must be in 0..{self.settings.vocabulary.size - 1}, but those of sample "
                    f"{number} of the {self.name} split of {self.indexed.prefix} span "
                    f"{min(tokens)}..{max(tokens)}; use the tokenizer the dataset was made with."
                )
            texts.append((tokens, target))
        seeds = (numbers + self.settings.seed % (1 << 32)) % (1 << 32)
        return self.settings.samples(texts, seeds.tolist())
