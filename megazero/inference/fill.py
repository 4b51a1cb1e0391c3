"""Predicts the masked tokens of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import ConfigError, DataError
from megazero.inference.staged import StagedModel
from megazero.models.batch import Collate, MicroBatch
from megazero.models.bert_batch import BertBatch
from megazero.ops.attention import varying_shapes

_ROLES = ("cls", "sep", "mask", "pad")


@dataclass(frozen=True)
class Candidate:
    """A token for a masked place, and the model's probability of it."""

    token: str
    probability: float


@dataclass(frozen=True)
class MaskedText:
    """A text in the form that the model reads: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

    Attributes:
        tokens: the ids.
        types: 0 up to the first [SEP], then 1.
    """

    tokens: list[int]
    types: list[int]


class MaskFiller:
    """A masked language model with the tokenizer that it was trained with.

    Args:
        model: the whole model, or this stage's parts of it.
        tokenizer: the model's tokenizer.
        collate: turns arrays like a dataset's into a batch of the model.

    Raises:
        DataError: the tokenizer lacks a special token that the model needs.
    """

    def __init__(self, model: StagedModel[BertBatch], tokenizer: Tokenizer, collate: Collate[MicroBatch]):
        missing = [f"[{role.upper()}]" for role in _ROLES if role not in tokenizer.special_ids]
        if missing:
            raise DataError(
                f"`tokenizer` must have [CLS], [SEP], [MASK] and [PAD], but lacks {', '.join(missing)}; use "
                "the one that the model was trained with"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.collate = collate
        self._ids = {role: tokenizer.special_ids[role] for role in _ROLES}
        self._names = {role: tokenizer.decode([number]) for role, number in self._ids.items()}

    def fill(
        self, texts: Sequence[str], *, top_k: int = 5, batch_size: int = 16
    ) -> list[list[list[Candidate]]]:
        """Return the `top_k` most likely tokens of each mask of each text, the most likely first.

        Every rank of the model calls this with the same arguments and returns the same. A text may be a pair
        of segments with a [SEP] between them. Probabilities are over the model's whole vocabulary.

        Raises:
            ConfigError: `top_k` or `batch_size` is not positive.
            DataError: a text has no mask, more than two segments, or more tokens than the model's positions.
        """
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"`{name}` must be at least 1, but is {value}; set a positive number")
        rows = [self.encode(number, text) for number, text in enumerate(texts, 1)]
        filled: list[list[list[Candidate]]] = []
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            inputs = self.collate(self._arrays(batch), tuple(range(len(batch))))
            assert isinstance(inputs, BertBatch), "a masked language model takes such batches"
            with torch.inference_mode(), varying_shapes():
                logits = self.model.masked_logits(inputs)
            candidates = iter(self._best(logits, top_k))
            filled += [list(islice(candidates, row.tokens.count(self._ids["mask"]))) for row in batch]
        return filled

    def encode(self, number: int, text: str) -> MaskedText:
        """Encode a text; its number is for error messages.

        Raises:
            DataError: see `fill`.
        """
        mask, sep = self._names["mask"], self._names["sep"]
        segments = text.split(sep)
        if mask not in text:
            raise DataError(
                f"`text` must contain {mask}, but text {number} is {text[:80]!r}; write {mask} where a token "
                "is missing"
            )
        if len(segments) > 2:
            raise DataError(
                f"`text` must have at most one {sep} between two segments, but text {number} has "
                f"{len(segments) - 1}; give the others as texts of their own"
            )
        tokens, types = [self._ids["cls"]], [0]
        for kind, segment in enumerate(segments):
            ids = [*self._encode_around_masks(segment), self._ids["sep"]]
            tokens += ids
            types += [kind] * len(ids)
        if len(tokens) > self.model.spec.positions:
            raise DataError(
                f"`text` must have at most {self.model.spec.positions} tokens, the model's positions, but "
                f"text {number} has {len(tokens)} with the special ones; shorten it"
            )
        return MaskedText(tokens, types)

    def _encode_around_masks(self, segment: str) -> list[int]:
        # A tokenizer encodes "[MASK]" in a text as plain letters, so the text is split at the masks.
        first, *others = (self.tokenizer.encode(part) for part in segment.split(self._names["mask"]))
        return [*first, *(token for part in others for token in (self._ids["mask"], *part))]

    def _arrays(self, rows: Sequence[MaskedText]) -> dict[str, np.ndarray]:
        """The arrays of `BERTDataset.batch`; the labels of the masks are unknown and set to 0."""
        lengths = np.array([len(row.tokens) for row in rows])
        shape = (len(rows), int(lengths.max()))
        tokens, types = np.full(shape, self._ids["pad"]), np.zeros(shape, dtype=np.int64)
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = row.tokens
            types[number, : len(row.types)] = row.types
        masked = tokens == self._ids["mask"]
        return {
            "tokens": tokens,
            "token_types": types,
            "labels": np.where(masked, 0, -1),
            "loss_mask": masked.astype(np.float32),
            "lengths": lengths,
            "is_random": np.zeros(len(rows), dtype=np.int64),
            "truncated": np.zeros(len(rows), dtype=np.int64),
        }

    def _best(self, logits: Tensor, top_k: int) -> list[list[Candidate]]:
        """logits [m, v] -> the best candidates for each of m masks, among the tokens of the tokenizer."""
        known = self.tokenizer.vocab_size
        best = logits.float().softmax(-1)[:, :known].topk(min(top_k, known), dim=-1)
        return [
            [Candidate(self.tokenizer.decode([number]), value) for number, value in zip(*row, strict=True)]
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
