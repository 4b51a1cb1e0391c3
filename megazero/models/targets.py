"""`Targets`: the tokens that a language model learns to predict, and their weights in the loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """The token that follows each position.

    Attributes:
        labels: int64 [b, s], the tokens.
        weights: float32 [b, s], weight of each position in the loss; None means 1 everywhere.
        counted: the sum of the weights, a number on the host; None without weights.
    """

    labels: Tensor
    weights: Tensor | None = None
    counted: float | None = None

    def __post_init__(self) -> None:
        assert (self.weights is None) == (self.counted is None), "weights go with what they count"

    @property
    def count(self) -> float:
        """The weighted number of positions."""
        return float(self.labels.numel()) if self.counted is None else self.counted

    def weighted(self, values: Tensor) -> Tensor:
        """Multiply the values [s, b] of positions by their weights."""
        return values if self.weights is None else values * self.weights.t()
