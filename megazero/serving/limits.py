"""`EngineLimits`: what bounds an engine's memory and steps, and what follows for requests."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.errors import ConfigError, DataError, MegazeroError
from megazero.inference.coded import SCALE_BYTES
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.serving.wanted import Wanted
from megazero.spec.parts import LatentAttentionSpec

_MEMORY = 1 << 29


class QueueFullError(MegazeroError):
    """More requests would wait than an engine may hold."""


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of an engine's memory and of its steps.

    Attributes:
        max_length: the most tokens of a request, prompt and text.
        pages: the number of pages of keys and values.
        page: the positions of a page, a multiple of 16.
        tokens_per_step: the most tokens of a step; bounds the memory of activations.
        max_running: the most requests in a step, at most `tokens_per_step`.
        max_waiting: the most requests that wait.

    Raises:
        ConfigError: a value is out of range.
    """

    max_length: int = 2048
    pages: int = 1024
    page: int = 32
    tokens_per_step: int = 512
    max_running: int = 64
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        low = [
            f"`{name}` must be at least 1, but is {value}; set a positive number"
            for name, value in vars(self).items()
            if value < 1
        ]
        if self.page % 16:
            low.append(f"`page` must be a multiple of 16, but is {self.page}; set 32")
        if self.max_running > self.tokens_per_step:
            low.append(
                f"`max_running` must be at most `tokens_per_step` ({self.tokens_per_step}), but is "
                f"{self.max_running}; each running request has a token in each step"
            )
        if low:
            raise ConfigError(low)

    @classmethod
    def of(
        cls,
        model: StagedModel[Batch],
        *,
        memory: int = _MEMORY,
        max_length: int | None = None,
        page: int = 32,
    ) -> EngineLimits:
        """Limits for sequences as long as the model takes, and pages for `memory` bytes of a rank's.

        There are pages for one sequence at least, and for no more than may run.
        """
        length, running = max_length or model.spec.positions, cls.max_running
        whole = -(-length // page)
        return cls(length, min(max(whole, memory // page_bytes(model, page)), whole * running), page)

    def check(self, model: StagedModel[Batch], wanted: Wanted) -> None:
        """Raise an error for a request that can never be answered.

        Raises:
            ConfigError: it is longer than the context, or than all pages.
            DataError: a token lies outside of the vocabulary.
        """
        prompt, new = len(wanted.prompt), wanted.max_tokens
        room = min(self.max_length, self.pages * self.page)
        if prompt + new > room:
            raise ConfigError(
                f"`prompt length + max_tokens` must be at most {room}, the lesser of the context of "
                f"{self.max_length} tokens and {self.pages} pages of {self.page}, but is {prompt} + {new}; "
                "shorten the prompt or ask for fewer tokens"
            )
        ids = (*wanted.prompt, *wanted.stop_ids, *wanted.penalties.logit_bias)
        low, high = min(ids), max(ids)
        if low < 0 or high >= model.vocab_size:
            raise DataError(
                f"`tokens` must lie in [0, {model.vocab_size}), but those of the request range from {low} to "
                f"{high}; were they made with another tokenizer?"
            )


def page_bytes(model: StagedModel[Batch], page: int) -> int:
    """The bytes of a rank's memory that a page of all its layers takes, at most; at least 1."""
    size, tp, total = 1 if model.coded_cache else model.placement.dtype.itemsize, model.placement.tp.size, 0
    for attention in model.spec.attentions():
        if isinstance(attention, LatentAttentionSpec):
            groups, key, value = tp, attention.rank, attention.rotary_dim
        else:
            groups, key, value = attention.groups, attention.head_dim, attention.value_dim
        scales = SCALE_BYTES * (key + page) if model.coded_cache else 0
        total += groups * (page * (key + value) * size + scales)
    return max(1, -(-total // (tp * model.pp.size)))
