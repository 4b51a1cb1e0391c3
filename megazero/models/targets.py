"""The tokens that a model of text learns to predict, and how much each of them counts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """The token that follows each position.

    Attributes:
        labels: int64 [b, s], the tokens.
        weights: float32 [b, s], weight of each position in the loss; None counts every position.
        counted: the sum of the weights, known on the host; given if and only if there are any.
    """

    labels: Tensor
    weights: Tensor | None = None
    counted: float | None = None

    def __post_init__(self) -> None:
        assert (self.weights is None) == (self.counted is None), "weights go with what they count"

    @property
    def count(self) -> float:
        """The weighted number of positions that count."""
        return float(self.labels.numel()) if self.counted is None else self.counted

    def weighted(self, values: Tensor) -> Tensor:
        """Values [s, b] of the positions, each times its weight in the loss."""
        return values if self.weights is None else values * self.weights.t()
