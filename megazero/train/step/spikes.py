"""Spikes: losses and gradient norms far above the latest ones.

The estimate is robust: the median of the latest updates, and 1.4826 times the median distance from it, which
is the standard deviation of a normal distribution (Hampel 1974), so that a spike does not hide the next one.
Norms are compared by their logarithms, as they vary by factors. Large runs are rolled back and go on without
the batches around a spike since PaLM (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_FEWEST = 20  # updates before a median says anything
_NORMAL = 1.4826  # standard deviations of a normal distribution in its median distance from the median
_LEAST_LOSS = 0.1  # of the median: a smaller rise is no spike, however steady the loss was
# Likewise. With clipping, trainings get over norms of 80 times the median, where the learning rate peaks.
_LEAST_NORM = math.log(128.0)
_CALM = 10  # steps after a spike


@dataclass(frozen=True)
class Spike:
    """A value far above the latest ones.

    Attributes:
        what: ``loss`` or ``gradient norm``.
        value: the step's value.
        usual: the median of the latest updates.
        limit: the highest value that is no spike.
    """

    what: str
    value: float
    usual: float
    limit: float

    def __str__(self) -> str:
        return f"{self.what} {self.value:.4g}, where {self.usual:.4g} is usual and {self.limit:.4g} the limit"


@dataclass(frozen=True)
class Recent:
    """The latest updates, and the latest spike. All of it is saved, so that a resumed run judges alike.

    Attributes:
        losses: total losses, the newest last, in nats.
        norms: gradient norms before clipping.
        spike: iteration of the latest spike, from 1; None before the first.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    spike: int | None = None

    def after(self, loss: float, norm: float, window: int) -> Recent:
        """Add an update; one whose loss or norm is not finite, or whose norm is 0, is left out."""
        if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
            return self
        return Recent((*self.losses, loss)[-window:], (*self.norms, norm)[-window:], self.spike)

    def spikes(self, loss: float, norm: float, threshold: float) -> list[Spike]:
        """The spikes among a step's loss and norm; none before there are enough updates to compare with.

        Args:
            loss: the total loss.
            norm: the gradient norm before clipping.
            threshold: standard deviations above the median.
        """
        if len(self.losses) < _FEWEST:
            return []
        spikes = []
        usual, spread = _centre(self.losses)
        limit = usual + max(threshold * spread, _LEAST_LOSS * abs(usual))
        if loss > limit:
            spikes.append(Spike("loss", loss, usual, limit))
        usual, spread = _centre([math.log(norm_before) for norm_before in self.norms])
        limit = usual + max(threshold * spread, _LEAST_NORM)
        if norm > 0 and math.log(norm) > limit:
            spikes.append(Spike("gradient norm", norm, math.exp(usual), math.exp(limit)))
        return spikes

    def calm(self, iteration: int) -> bool:
        """Whether training has recovered from the latest spike: it is long enough ago, or there was none."""
        return self.spike is None or iteration - self.spike >= _CALM


def _centre(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the robust standard deviation."""
    middle = median(values)
    return middle, _NORMAL * median(abs(value - middle) for value in values)
