"""Continues texts: a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import ConfigError, DataError
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.models.language_model import LanguageModel


class TextGenerator:
    """A model with the tokenizer that it was trained with.

    Raises DataError if the tokenizer has more tokens than the model.
    """

    def __init__(self, model: LanguageModel | StagedModel[Batch], tokenizer: Tokenizer):
        if tokenizer.vocab_size > model.vocab_size:
            raise DataError(
                f"`tokenizer` must have at most the model's {model.vocab_size} tokens, but has "
                f"{tokenizer.vocab_size}; use the one that the model was trained with"
            )
        self.model: LanguageModel | StagedModel[Batch] = (
            model if isinstance(model, StagedModel) else model.without_sequence_parallelism()
        )
        self.tokenizer = tokenizer

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        batch_size: int = 16,
        prefill_chunk: int | None = None,
    ) -> list[str]:
        """Return the continuation of each prompt, up to the end of the document or `max_new_tokens`.

        An empty prompt begins a new document. Only ids of the tokenizer's vocabulary are drawn. `batch_size`
        prompts are continued at a time, and `prefill_chunk` prompt positions are fed at once (None: all);
        both bound memory and do not change the texts.

        Raises:
            ConfigError: an argument is out of range, or a sequence is longer than the learned positions.
            DataError: a prompt is empty and the tokenizer has no end-of-document token to start from.
        """
        if batch_size < 1:
            raise ConfigError(f"`batch_size` must be at least 1, but is {batch_size}; set a positive number")
        sampling = sampling or Sampling()
        known = min(sampling.vocab_size or self.tokenizer.vocab_size, self.tokenizer.vocab_size)
        encoded = [self._encode(i, prompt) for i, prompt in enumerate(prompts)]
        texts = []
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            new = generate(
                self.model,
                batch,
                max_new_tokens=max_new_tokens,
                sampling=replace(sampling, vocab_size=known),
                eod=self.tokenizer.eod,
                numbers=range(start, start + len(batch)),
                prefill_chunk=prefill_chunk,
            )
            texts += [self._decode(prompt, tokens) for prompt, tokens in zip(batch, new, strict=True)]
        return texts

    def _encode(self, index: int, prompt: str) -> list[int]:
        tokens = self.tokenizer.encode(prompt)
        if tokens:
            return tokens
        # In training, a document follows the eod of the document before.
        if self.tokenizer.eod is None:
            raise DataError(
                f"`prompts` must not be empty for a tokenizer without an end-of-document token, but prompt "
                f"{index} is {prompt!r}; write at least one token"
            )
        return [self.tokenizer.eod]

    def _decode(self, prompt: list[int], new: list[int]) -> str:
        # Decode with the prompt: by itself, the new text would lose a leading space in SentencePiece.
        before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode(prompt + new)
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)
