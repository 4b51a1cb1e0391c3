"""Continues a batch of prompts of any lengths, token by token.

All sequences advance through the same positions, without padding: up to the end of its prompt a sequence is
fed the prompt's tokens, then the drawn tokens (as in Megatron-LM). So a batch gives the same tokens as each
prompt alone. While all sequences still have prompt tokens left, many positions are fed at once: all of them,
or in chunks (Agrawal et al. 2023, "Sarathi"), so that a long prompt takes the activation memory of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.errors import ConfigError, DataError
from megazero.inference.sampling import Sampling, choose_tokens
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch, Places
from megazero.models.language_model import LanguageModel
from megazero.ops.attention import varying_shapes

OnToken = Callable[[int, int], None]


def generate(
    model: LanguageModel | StagedModel[Batch],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eod: int | None = None,
    numbers: Sequence[int] | None = None,
    prefill_chunk: int | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Continue each prompt; every rank of the model calls this with the same arguments and returns the same.

    Dropout is off, and the model is not changed.

    Args:
        model: a model without sequence parallelism: the whole model, or this stage's parts.
        prompts: the token ids of each prompt, at least one token.
        max_new_tokens: the most tokens to add to each prompt.
        sampling: how tokens are drawn; None draws from the model's own distribution.
        eod: the id that ends a sequence; None lets all sequences run to `max_new_tokens`.
        numbers: numbers of the sequences in the random stream, so that a prompt draws the same tokens in any
            batch; the default is 0, 1, 2, ...
        prefill_chunk: the most prompt positions to feed at once; None for no limit. It bounds the memory of
            activations and does not change the tokens.
        on_token: called on every rank with (index of the prompt, token) as soon as a token is drawn.

    Returns:
        The new tokens of each prompt, without the `eod` that ended it.

    Raises:
        ConfigError: the model is sequence-parallel, a sequence is longer than a learned position table, or an
            argument is out of range.
        DataError: a prompt is empty or has a token outside the vocabulary.
        NumericsError: the model's logits are not finite.
    """
    staged = model if isinstance(model, StagedModel) else StagedModel.whole(model)
    _check(staged, prompts, max_new_tokens, numbers, prefill_chunk)
    if not prompts:
        return []
    sampling = sampling or Sampling()
    numbers = range(len(prompts)) if numbers is None else numbers
    rows = [
        _GrowingSequence(list(prompt), len(prompt) + max_new_tokens, number)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    step = _Stepper(staged, max(row.end for row in rows) - 1)
    position = 0
    with torch.inference_mode(), varying_shapes():
        while live := [row for row in rows if row.live]:
            # A live sequence has at least one token that was not fed yet, its last drawn one.
            stop = min(len(row.tokens) for row in live)
            if prefill_chunk is not None:
                stop = min(stop, position + prefill_chunk)
            logits = step([row.span(position, stop) for row in rows])
            position = stop
            due = [i for i, row in enumerate(rows) if row.live and len(row.tokens) == position]
            if not due:
                continue
            drawn = choose_tokens(logits[due], sampling, [rows[i].number for i in due], position)
            for i, token in zip(due, drawn.tolist(), strict=True):
                if rows[i].accept(token, eod) and on_token is not None:
                    on_token(i, token)
    return [row.tokens[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@dataclass
class _GrowingSequence:
    """A sequence being generated. tokens: the tokens so far; end: the most tokens; number: in the stream."""

    tokens: list[int]
    end: int
    number: int
    live: bool = True

    def span(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop); a sequence that has ended is padded with tokens whose logits nobody reads."""
        tokens = self.tokens[start:stop]
        return tokens + [self.tokens[0]] * (stop - start - len(tokens))

    def accept(self, token: int, eod: int | None) -> bool:
        """Append a drawn token unless it ends the sequence; return whether it was appended."""
        if token == eod:
            self.live = False
            return False
        self.tokens.append(token)
        self.live = len(self.tokens) < self.end
        return True


class _Stepper:
    """Feeds positions to the model and returns the logits after the last of them."""

    def __init__(self, model: StagedModel[Batch], max_length: int):
        self.model = model
        self.cache = model.new_cache(max_length)
        self.fed = 0

    def __call__(self, tokens: list[list[int]]) -> Tensor:
        """Feed the next tokens [b, s]; return the logits of the token after them, float32 [b, v]."""
        start, self.fed = self.fed, self.fed + len(tokens[0])
        batch = Batch(
            tokens=torch.tensor(tokens, device=self.model.device), places=Places(range(start, self.fed))
        )
        return self.model.logits(batch, self.cache)


def _check(
    model: StagedModel[Batch],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    numbers: Sequence[int] | None,
    prefill_chunk: int | None,
) -> None:
    if model.placement.sequence_parallel:
        raise ConfigError(
            "`sequence_parallel` must be off to generate, but is on; pass "
            "`model.without_sequence_parallelism()`, which has the same weights"
        )
    if max_new_tokens < 1:
        raise ConfigError(f"`max_new_tokens` must be at least 1, but is {max_new_tokens}; ask for a token")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ConfigError(
            f"`prefill_chunk` must be at least 1, but is {prefill_chunk}; leave it out to feed prompts whole"
        )
    if numbers is not None and len(numbers) != len(prompts):
        raise ConfigError(
            f"`numbers` must be one per prompt ({len(prompts)}), but are {len(numbers)}; leave them out"
        )
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"`prompts` must have a token each, but prompt {i} is empty; begin it with eod")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= model.vocab_size:
            raise DataError(
                f"`prompts` must have tokens in [0, {model.vocab_size}), but those of prompt {i} range from "
                f"{low} to {high}; was it made with another tokenizer?"
            )
    _check_positions(model, max((len(prompt) for prompt in prompts), default=0), max_new_tokens)


def _check_positions(model: StagedModel[Batch], longest_prompt: int, max_new_tokens: int) -> None:
    positions = model.spec.positions
    needed = longest_prompt + max_new_tokens - 1  # the last token drawn is never fed
    learned = model.spec.embedding.positions > 0
    sparse = any(attention.sight.sparse for attention in model.spec.attentions())
    if (learned or sparse) and needed > positions:
        kind = "learned positions" if learned else "positions of the sparse attention's layout"
        raise ConfigError(
            f"`prompt length + max_new_tokens - 1` must be at most the {positions} {kind}, but is "
            f"{needed}; shorten the prompt or set fewer new tokens"
        )
