"""Answers texts by an encoder and a decoder.

A text is encoded once. The decoder's keys and values of the encoded text are cached beside those of the drawn
tokens, so that each further token costs the work of one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import ConfigError, DataError
from megazero.inference.cache import KeyValueCache
from megazero.inference.sampling import Sampling, choose_tokens
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch, Places
from megazero.models.pairs.batch import PairBatch
from megazero.models.pairs.layers import PairStore
from megazero.ops.attention import varying_shapes


class PairCache(KeyValueCache, PairStore):
    """Keys and values of the drawn tokens, and of the encoder's output for cross-attention."""

    def __init__(self, max_length: int):
        super().__init__(max_length)
        self._encoded: dict[int, tuple[Tensor, Tensor]] = {}

    def of_encoder(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The keys and values of a layer's cross-attention; None before the first step."""
        return self._encoded.get(layer)

    def keep_of_encoder(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values of a layer's cross-attention."""
        self._encoded[layer] = key, value


def answer(
    model: StagedModel[PairBatch],
    sources: Sequence[Sequence[int]],
    *,
    start: int,
    end: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """Answer each text; every rank of the model calls this with the same arguments and returns the same.

    Dropout is off, and the model is not changed.

    Args:
        model: a model without sequence parallelism: the whole model, or this stage's parts.
        sources: the token ids of each text.
        start: the decoder's first input.
        end: the id that ends an answer; answers are returned without it.
        max_new_tokens: the most tokens of an answer.
        sampling: how tokens are drawn; None draws from the model's own distribution.
        numbers: numbers of the answers in the random stream, so that a text draws the same tokens in any
            batch; the default is 0, 1, 2, ...

    Raises:
        ConfigError: a text is longer than a learned position table, or an argument is out of range.
        DataError: a text is empty or has a token outside the vocabulary.
        NumericsError: the model's logits are not finite.
    """
    _check(model, sources, max_new_tokens)
    sampling, numbers = sampling or Sampling(), range(len(sources)) if numbers is None else numbers
    cache, answers = PairCache(max_new_tokens), [list[int]() for _ in sources]
    live = set(range(len(sources)))
    batch = _first_batch(sources, start, model.device)
    with torch.inference_mode(), varying_shapes():
        for position in range(max_new_tokens):
            drawn = choose_tokens(model.logits(batch, cache), sampling, numbers, position)
            ids = drawn.tolist()
            live -= {i for i in live if ids[i] == end}
            if not live:
                break
            for i in live:
                answers[i].append(ids[i])
            no_tokens = batch.tokens[:, :0]  # the texts have been encoded in the first step
            place = Places(range(position + 1, position + 2))
            batch = replace(batch, tokens=no_tokens, decoder=Batch(drawn.unsqueeze(1), places=place))
    return answers


def answer_texts(
    model: StagedModel[PairBatch],
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int = 16,
) -> list[str]:
    """`answer` for plain texts, `batch_size` at a time; only ids of the tokenizer's vocabulary are drawn."""
    if batch_size < 1:
        raise ConfigError(f"`batch_size` must be at least 1, but is {batch_size}; set a positive number")
    ids = SpanVocabulary.of(tokenizer)
    sources = [[*row.tolist(), ids.end] for row in tokenizer.encode_batch(texts).rows()]
    answers = []
    for first in range(0, len(sources), batch_size):
        batch = sources[first : first + batch_size]
        answers += answer(
            model,
            batch,
            start=ids.start,
            end=ids.end,
            max_new_tokens=max_new_tokens,
            sampling=replace(sampling, vocab_size=min(tokenizer.vocab_size, model.vocab_size)),
            numbers=range(first, first + len(batch)),
        )
    return [tokenizer.decode(ids) for ids in answers]


def _first_batch(sources: Sequence[Sequence[int]], start: int, device: torch.device) -> PairBatch:
    lengths = torch.tensor([len(source) for source in sources])
    tokens = torch.zeros(len(sources), int(lengths.max()), dtype=torch.int64)
    for row, source in zip(tokens, sources, strict=True):
        row[: len(source)] = torch.tensor(source)
    real = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    return PairBatch(
        tokens.to(device),
        decoder=Batch(torch.full((len(sources), 1), start, device=device)),
        mask=None if bool(real.all()) else real[:, None, None].to(device),
        read=int(lengths.sum()) + len(sources),
    )


def _check(model: StagedModel[PairBatch], sources: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"`max_new_tokens` must be at least 1, but is {max_new_tokens}; ask for a token")
    for i, source in enumerate(sources):
        if not source or min(source) < 0 or max(source) >= model.vocab_size:
            raise DataError(
                f"`sources` must have tokens in [0, {model.vocab_size}), but those of text {i} are "
                f"{list(source)[:8]}; were they made with another tokenizer?"
            )
    longest, positions = max(max_new_tokens, *map(len, sources)), model.spec.positions
    if model.spec.embedding.positions and longest > positions:
        raise ConfigError(
            f"texts and answers must be at most {positions} tokens long, the learned positions, but may be "
            f"{longest}; shorten the text or set fewer new tokens"
        )
