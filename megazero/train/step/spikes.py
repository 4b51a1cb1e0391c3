"""Spikes: losses and gradient norms far above the latest ones.

The estimate is robust, so that a spike does not hide the next one: the median of the latest updates, and
1.4826 times the median absolute deviation, which is the standard deviation of a normal distribution (Hampel
1974). Norms are compared by their logarithms, because they vary by factors. Rolling back and skipping the
batches around a spike is PaLM's remedy (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_FEWEST = 20  # updates before the median is used
_NORMAL = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
_LEAST_LOSS = 0.1  # of the median: a smaller rise is no spike, however steady the loss was
# Likewise: with clipping, trainings recover from 80 times the median norm where the learning rate peaks.
_LEAST_NORM = math.log(128.0)
_CALM = 10  # steps after a spike until training has recovered


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
    """The latest updates and the latest spike, saved so that a resumed run finds the same spikes.

    Attributes:
        losses: total losses in nats, the newest last.
        norms: gradient norms before clipping, the newest last.
        spike: iteration of the latest spike, from 1; None before the first.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    spike: int | None = None

    def after(self, loss: float, norm: float, window: int) -> Recent:
        """Add an update, unless its loss or norm is not finite, or its norm is 0."""
        if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
            return self
        return Recent((*self.losses, loss)[-window:], (*self.norms, norm)[-window:], self.spike)

    def spikes(self, loss: float, norm: float, threshold: float) -> list[Spike]:
        """The spikes among a step's loss and norm; none before there are enough earlier updates.

        `threshold` is in standard deviations above the median.
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
        """Whether the latest spike, if any, is long enough ago for training to have recovered."""
        return self.spike is None or iteration - self.spike >= _CALM


def _centre(values: Sequence[float]) -> tuple[float, float]:
    """The median and the robust standard deviation."""
    middle = median(values)
    return middle, _NORMAL * median(abs(value - middle) for value in values)
