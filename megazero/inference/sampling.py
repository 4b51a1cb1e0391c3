"""The choice of the next token: pure functions of the logits and of a counter-based random number.

The random number of a token is a function of (seed, number of the sequence, position), and a token is drawn
by inverting the cumulative distribution in the order of ids, not of probabilities. So the token depends
neither on the rest of the batch, nor on the tensor-parallel layout, nor on rounding that swaps two nearly
equal probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.errors import ConfigError, NumericsError
from megazero.mpu.rng import derive_key
from megazero.ops.counter_random import hash_uniform

_UNITS = 2.0**52
"""Units of probability in 1."""
_NUCLEUS = 1024
"""The number of likeliest tokens among which a nucleus is looked for, before all are sorted."""


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing tokens: temperature, then top-k, top-p and min-p among the remaining tokens.

    Attributes:
        temperature: logits are divided by it; towards 0, only the most likely token is drawn.
        top_k: the number of most likely tokens to draw among; 0 means all tokens.
        top_p: draw among the fewest most likely tokens with at least this total probability (nucleus
            sampling, Holtzman et al. 2020); 1 means all tokens.
        min_p: draw among tokens with at least this share of the likeliest one's probability (Nguyen et al.
            2024); 0 means all tokens.
        greedy: always take the most likely token, of equal ones the smallest id; nothing is random.
        seed: seed of the random numbers.
        vocab_size: only ids below this are drawn; None means the model's whole vocabulary. Padding of the
            vocabulary is never drawn.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0
    vocab_size: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        violations = []
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            violations.append(
                f"`temperature` must be positive and finite, but is {self.temperature}; "
                f"set `greedy` for the limit at 0"
            )
        if self.top_k < 0:
            violations.append(f"`top_k` must be at least 0, but is {self.top_k}; set 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            violations.append(f"`top_p` must be in (0, 1], but is {self.top_p}; set 1 to keep all tokens")
        if not 0 <= self.min_p <= 1:
            violations.append(f"`min_p` must be in [0, 1], but is {self.min_p}; set 0 to keep all tokens")
        if self.vocab_size is not None and self.vocab_size < 1:
            violations.append(f"`vocab_size` must be at least 1, but is {self.vocab_size}; leave it out")
        if violations:
            raise ConfigError(violations)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn among some tokens only, by their probabilities."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


def keep_top_k(scores: Tensor, k: int | Tensor) -> Tensor:
    """Set all scores [b, v] but the `k` largest of a row to -inf; of equal scores the smaller id stays.

    k: one for all rows, or int64 [b, 1], each in [1, v].
    """
    count = torch.as_tensor(k, device=scores.device).expand(len(scores), 1)
    ranked = scores.topk(int(count.max()), dim=-1).values
    least = ranked.gather(-1, count - 1)  # the smallest score that stays
    equals = scores == least
    spare = count - (scores > least).sum(-1, keepdim=True)
    stays = (scores > least) | (equals & (equals.cumsum(-1) <= spare))
    return scores.masked_fill(~stays, -torch.inf)


def keep_top_p(scores: Tensor, p: float | Tensor) -> Tensor:
    """Set scores [b, v] outside the nucleus to -inf: the fewest largest scores with softmax mass `p`.

    p: one for all rows, or float64 [b, 1].
    """
    probs, width = scores.softmax(dim=-1), scores.shape[-1]
    for count in (min(_NUCLEUS, width), width):
        ids = scores.topk(count, dim=-1).indices.sort(dim=-1).values
        ranked, at = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        order = ids.gather(-1, at)
        mass = _in_units(probs.gather(-1, order))
        outside = mass.cumsum(dim=-1) - mass >= p * _UNITS
        outside[:, 0] = False  # the most likely token always stays
        if bool((outside | (ranked > ranked[:, -1:])).all()):
            break  # what is not among these is neither inside nor equal to what is
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, ~outside)
    return scores.masked_fill(~inside, -torch.inf)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that a token is drawn from: logits [b, v] -> float64 [b, v], rows summing to 1."""
    return _probabilities(logits, [sampling] * len(logits))


def _probabilities(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """The distribution of each row by its own settings, float64 [b, v]."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(-1)

    scores, width = logits.double(), logits.shape[-1]
    # First shift the largest score to 0, so that no temperature makes it overflow.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores /= column([one.temperature for one in settings])
    if rows := [i for i, one in enumerate(settings) if 0 < one.top_k < width]:
        scores[rows] = keep_top_k(scores[rows], column([settings[i].top_k for i in rows], torch.int64))
    if rows := [i for i, one in enumerate(settings) if one.top_p < 1]:
        scores[rows] = keep_top_p(scores[rows], column([settings[i].top_p for i in rows]))
    if rows := [i for i, one in enumerate(settings) if one.min_p > 0]:
        least = column([math.log(settings[i].min_p) for i in rows])
        kept = scores[rows]
        scores[rows] = kept.masked_fill(kept < least, -torch.inf)
    return scores.softmax(dim=-1)


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens by inverting the cumulative distribution: probs [b, v], uniforms [b] -> int64 [b]."""
    cumulative = _in_units(probs).cumsum(dim=-1)
    # Scaled by the sum of the row, so that a uniform below 1 always hits a token of positive probability.
    points = (uniforms.double().unsqueeze(-1) * cumulative[:, -1:]).long()
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1)


def _in_units(probs: Tensor) -> Tensor:
    """Probabilities as int64: sums of floats have no order on a GPU, and raise in deterministic mode."""
    return (probs.double() * _UNITS).round().long()


def token_uniforms(seed: int, numbers: Sequence[int], position: int, device: torch.device | str) -> Tensor:
    """The random number in [0, 1) of the token at `position` of each numbered sequence, float32 [b]."""
    return _uniforms([(seed, number, position) for number in numbers], device)


def _uniforms(places: Sequence[tuple[int, int, int]], device: torch.device | str) -> Tensor:
    """The random number of each (seed, number of the sequence, position), float32 [b]."""
    keys = [derive_key(seed, "generate", number, position) for seed, number, position in places]
    return hash_uniform(
        torch.tensor(keys, device=device), torch.zeros(len(keys), dtype=torch.int64, device=device)
    )


def choose_tokens(logits: Tensor, sampling: Sampling, numbers: Sequence[int], position: int) -> Tensor:
    """Choose the tokens at `position` of the numbered sequences from logits [b, v]; return int64 [b].

    Raises NumericsError if a logit is not finite.
    """
    if sampling.vocab_size is not None:
        logits = logits[:, : sampling.vocab_size]
    finite = logits.isfinite().all(dim=-1)
    if not bool(finite.all()):
        bad = int(finite.logical_not().nonzero()[0])
        raise NumericsError(
            f"`logits` must be finite, but those at position {position} of sequence {numbers[bad]} are not; "
            f"were the weights trained until they diverged?"
        )
    return draw_tokens(logits, [sampling] * len(numbers), numbers, [position] * len(numbers))


def draw_tokens(
    logits: Tensor, settings: Sequence[Sampling], numbers: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Choose a token for each row of logits [b, v] by settings of its own; return int64 [b].

    A row's token is that of `choose_tokens` for this row alone. Logits may be -inf, which are never drawn.
    """
    drawn = torch.empty(len(settings), dtype=torch.int64, device=logits.device)
    kinds: dict[tuple[bool, int | None], list[int]] = {}
    for i, one in enumerate(settings):
        kinds.setdefault((one.greedy, one.vocab_size), []).append(i)
    for (greedy, vocab_size), rows in kinds.items():
        own = (logits if len(rows) == len(logits) else logits[rows])[:, :vocab_size]
        if greedy:
            drawn[rows] = own.argmax(dim=-1)
            continue
        places = [(settings[i].seed, numbers[i], positions[i]) for i in rows]
        probs = _probabilities(own, [settings[i] for i in rows])
        drawn[rows] = invert_cdf(probs, _uniforms(places, logits.device))
    return drawn
