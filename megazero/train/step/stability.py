"""The stability of a training: the spread of loss and gradient norm over recent updates, and loss spikes.

Long sequences early in a training, large batches and high learning rates make both vary, before or without a
divergence; sequences that grow are the remedy (Li et al. 2022, the Stability-Efficiency Dilemma, whose loss
ratio this is).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A mean and a variance in which each update weighs less than the next.

    While there are no more values than the window has, they weigh the same: a plain mean and variance. From
    then on a value's weight falls by a factor of 1 - 1/window with each one after it (West 1979; Finch 2009).
    """

    mean: float = 0.0
    variance: float = 0.0

    def after(self, value: float, weight: float) -> Spread:
        """Add a value that has the share `weight` of all weights; the first value has weight 1."""
        away = value - self.mean
        return Spread(self.mean + weight * away, (1.0 - weight) * (self.variance + weight * away * away))

    @property
    def deviation(self) -> float:
        """The standard deviation, in the unit of the values."""
        return math.sqrt(self.variance)


@dataclass(frozen=True)
class Stability:
    """Statistics of the updates so far. All of them are saved, so that a resumed run reports the same.

    Attributes:
        updates: how many were made; skipped steps make none.
        lowest: the lowest loss of all but the last of them; None before the second.
        last: the last one's loss.
        loss, grad_norm: the spread of the total loss, in nats, and of the gradient norm before clipping.
    """

    updates: int = 0
    lowest: float | None = None
    last: float | None = None
    loss: Spread = Spread()
    grad_norm: Spread = Spread()

    def after(self, loss: float, grad_norm: float, window: int) -> Stability:
        """Add an update; one whose loss or norm is not finite changes nothing.

        Args:
            loss: the total loss.
            grad_norm: the global gradient norm, before clipping.
            window: number of updates over which spreads are taken.
        """
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
        """The last loss as a multiple of the lowest before it; None where there is none above 0."""
        if self.last is None or self.lowest is None or self.lowest <= 0:
            return None
        return self.last / self.lowest
