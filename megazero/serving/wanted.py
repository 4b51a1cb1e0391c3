"""Requests, and the events that they are told: plain values, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megazero.errors import ConfigError
from megazero.inference.sampling import Sampling

Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Penalties:
    """Changes of the logits that tokens are drawn from, by what a sequence has already and by ids.

    They come before temperature, in this order.

    Attributes:
        repetition: logits of tokens of the prompt and the text are divided by it if positive, else multiplied
            (Keskar et al. 2019); 1 for none.
        frequency: subtracted for every time that the text, without its prompt, has the token.
        presence: subtracted once if the text has the token.
        logit_bias: id -> added to its logit.

    Raises:
        ConfigError: `repetition` is not positive.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.repetition > 0:
            raise ConfigError(f"`repetition` must be positive, but is {self.repetition}; set 1 for none")

    @property
    def idle(self) -> bool:
        """Whether nothing is changed."""
        return self.repetition == 1.0 and not (self.frequency or self.presence or self.logit_bias)


NO_PENALTIES = Penalties()
_OWN_DISTRIBUTION = Sampling()


@dataclass(frozen=True)
class Wanted:
    """A request: a prompt to continue, or to score.

    Attributes:
        prompt: its tokens, at least one.
        max_tokens: the most tokens to draw; 0 scores the prompt only.
        sampling: how tokens are drawn.
        number: number of the request in the random stream of `sampling.seed`.
        stop_ids: a token among these ends the request when it is drawn; it is its last token.
        min_tokens: the number of tokens before which `stop_ids` are not drawn.
        penalties: changes of the logits that tokens are drawn from.
        logprobs: tell the log-probability of each drawn token and so many of the likeliest; None: neither.
        prompt_logprobs: the same for the prompt's tokens, except the first, which has none.
        as_drawn: tell instead the log-probability in the distribution that the token was drawn from, with all
            tokens that it was drawn among, without theirs, if those are not all.
        salt: keys and values of a prompt are shared only with requests of an equal salt.

    Raises:
        ConfigError: the prompt is empty, or a number is negative.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = _OWN_DISTRIBUTION
    number: int = 0
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    penalties: Penalties = NO_PENALTIES
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    as_drawn: bool = False
    salt: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("`prompt` must have a token, but is empty; begin it with the end of a document")
        for name in ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"`{name}` must be at least 0, but is {getattr(self, name)}; leave it out")


class Token(NamedTuple):
    """A token that was drawn, or one of a scored prompt.

    Log-probabilities are natural logarithms of the model's own distribution, before temperature, penalties
    and masks, except with `Wanted.as_drawn`.

    Attributes:
        id: the token.
        logprob: its log-probability; None if nobody asked.
        best: (id, log-probability) of the likeliest tokens, from the likeliest.
        entropy: with `Wanted.as_drawn`, that of the distribution that it was drawn from, in nats.
    """

    id: int
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()
    entropy: float = 0.0


@dataclass(frozen=True)
class PromptScores:
    """The prompt's tokens with their log-probabilities; the first is None. Told once, before any `Token`."""

    tokens: tuple[Token | None, ...]


@dataclass(frozen=True)
class Ended:
    """The end of a request, the last event that it is told.

    Attributes:
        reason: what ended it: a token of `stop_ids`, `max_tokens`, `Engine.cancel`, or an error.
        message: the error.
    """

    reason: Reason
    message: str = ""


Event = Token | PromptScores | Ended
Listener = Callable[[Event], None]
