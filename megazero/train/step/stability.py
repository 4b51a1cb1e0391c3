"""The stability of a training: deviations of loss and gradient norm over recent updates, and the loss ratio.

Long sequences early in training, large batches and high learning rates make both vary, with or without a
later divergence; a sequence length curriculum reduces this (Li et al. 2022, "The Stability-Efficiency
Dilemma", which defines the loss ratio).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RunningMoments:
    """A mean and a variance over recent values.

    They are plain until the window is full of values; then they are exponentially weighted, each
    value's weight falling by a factor of 1 - 1/window with every later value (West 1979; Finch 2009).
    """

    mean: float = 0.0
    variance: float = 0.0

    def after(self, value: float, weight: float) -> RunningMoments:
        """Add a value with this fraction of the total weight; the first value has weight 1."""
        away = value - self.mean
        return RunningMoments(
            self.mean + weight * away, (1.0 - weight) * (self.variance + weight * away * away)
        )

    @property
    def deviation(self) -> float:
        """The standard deviation, in the unit of the values."""
        return math.sqrt(self.variance)


@dataclass(frozen=True)
class Stability:
    """Statistics of the updates so far, saved so that a resumed run reports the same.

    Attributes:
        updates: number of updates; skipped steps make none.
        lowest: the lowest loss before the last update; None before the second update.
        last: the loss of the last update.
        loss, grad_norm: moments of the total loss in nats, and of the gradient norm before clipping.
    """

    updates: int = 0
    lowest: float | None = None
    last: float | None = None
    loss: RunningMoments = RunningMoments()
    grad_norm: RunningMoments = RunningMoments()

    def after(self, loss: float, grad_norm: float, window: int) -> Stability:
        """Add an update, unless its loss or norm is not finite; moments are over `window` updates."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self
        weight = 1.0 / min(self.updates + 1, window)
        known = [loss_before for loss_before in (self.lowest, self.last) if loss_before is not None]
        return Stability(
            self.updates + 1,
            min(known) if known else None,
            loss,
            self.loss.after(loss, weight),
            self.grad_norm.after(grad_norm, weight),
        )

    @property
    def loss_ratio(self) -> float | None:
        """The last loss divided by the lowest before it; None if there is none above 0."""
        if self.last is None or self.lowest is None or self.lowest <= 0:
            return None
        return self.last / self.lowest
