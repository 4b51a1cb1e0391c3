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


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing tokens: temperature, then top-k, then top-p among the remaining tokens.

    Attributes:
        temperature: logits are divided by it; towards 0, only the most likely token is drawn.
        top_k: the number of most likely tokens to draw among; 0 means all tokens.
        top_p: draw among the fewest most likely tokens with at least this total probability (nucleus
            sampling, Holtzman et al. 2020); 1 means all tokens.
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
        if self.vocab_size is not None and self.vocab_size < 1:
            violations.append(f"`vocab_size` must be at least 1, but is {self.vocab_size}; leave it out")
        if violations:
            raise ConfigError(violations)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Set all scores [b, v] but the `k` largest of a row to -inf; of equal scores the smaller id stays."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return scores.scatter(-1, order[:, k:], -torch.inf)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Set scores [b, v] outside the nucleus to -inf: the fewest largest scores with softmax mass `p`."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = ranked.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    outside = before >= p
    outside[:, 0] = False  # the most likely token always stays
    return scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that a token is drawn from: logits [b, v] -> float64 [b, v], rows summing to 1."""
    scores = logits.double()
    # First shift the largest score to 0, so that no temperature makes it overflow.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores = keep_top_p(scores, sampling.top_p)
    return scores.softmax(dim=-1)


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens by inverting the cumulative distribution: probs [b, v], uniforms [b] -> int64 [b]."""
    cumulative = probs.double().cumsum(dim=-1)
    # Scaled by the sum of the row, so that a uniform below 1 always hits a token of positive probability.
    points = uniforms.double().unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1)


def token_uniforms(seed: int, numbers: Sequence[int], position: int, device: torch.device | str) -> Tensor:
    """The random number in [0, 1) of the token at `position` of each numbered sequence, float32 [b]."""
    keys = torch.tensor([derive_key(seed, "generate", number, position) for number in numbers], device=device)
    return hash_uniform(keys, torch.zeros_like(keys))


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
    if sampling.greedy:
        return logits.argmax(dim=-1)
    return invert_cdf(
        probabilities(logits, sampling), token_uniforms(sampling.seed, numbers, position, logits.device)
    )
