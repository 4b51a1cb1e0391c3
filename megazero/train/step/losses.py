"""Loss terms of a step: from counts to weights before backward, from sums and counts to losses after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megazero.host_memory import sent_to
from megazero.loss import PADDING, LossTerm
from megazero.models.batch import MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.host import Reading


def local_counts(
    terms: Sequence[LossTerm], batches: Iterable[MicroBatch], context: ParallelContext
) -> Tensor:
    """This rank's summand of each term's count, float64 [terms], copied to the device without waiting."""
    by_batch = [batch.counts_of_share(context.groups["cp"].size) for batch in batches]
    counts = [sum(counts[term.over] for counts in by_batch) for term in terms]
    return sent_to(context.device, torch.tensor(counts, dtype=torch.float64))


def loss_factors(terms: Sequence[LossTerm], counts: Tensor, scale: float) -> Tensor:
    """The weight of each term's sum in backward, float32 [terms], on the device of `counts`.

    Args:
        counts: the counts of the global batch, float64 [terms]; a term with count 0 gets weight 0.
    """
    weights = torch.tensor([scale * term.coefficient for term in terms], dtype=torch.float64)
    return torch.where(counts > 0, sent_to(counts.device, weights) / counts, 0.0).float()


@dataclass(frozen=True)
class Losses:
    """The loss terms of a step or an evaluation; the same on all ranks.

    Attributes:
        terms: the model's loss terms. Perplexity is that of the first one.
        means: each term's sum divided by its count, in the term's unit (nats for cross-entropies); None if
            the count is 0.
    """

    terms: tuple[LossTerm, ...]
    means: tuple[float | None, ...]

    @classmethod
    def of(cls, terms: Sequence[LossTerm], sums: Sequence[float], counts: Sequence[float]) -> Losses:
        """Divide the sums over the global batch by their counts."""
        pairs = zip(sums, counts, strict=True)
        return cls(tuple(terms), tuple(total / count if count > 0 else None for total, count in pairs))

    def __getitem__(self, name: str) -> float | None:
        """The mean of a term, by name. Raises KeyError for an unknown term."""
        return {term.name: mean for term, mean in zip(self.terms, self.means, strict=True)}[name]

    def evaluated(self) -> Losses:
        """The losses without terms that evaluations do not compute."""
        kept = [(term, mean) for term, mean in zip(self.terms, self.means, strict=True) if term.evaluated]
        return Losses(tuple(term for term, _ in kept), tuple(mean for _, mean in kept))

    @property
    def main(self) -> float | None:
        """The first term's mean."""
        return self.means[0]

    @property
    def total(self) -> float | None:
        """The loss that training minimizes: the sum of the trained terms' means times their coefficients.

        None if the counts of all trained terms are 0.
        """
        pairs = zip(self.terms, self.means, strict=True)
        weighted = [term.coefficient * mean for term, mean in pairs if term.trained and mean is not None]
        return sum(weighted) if weighted else None

    @property
    def trained_total(self) -> float:
        """`total`, which must not be None."""
        assert self.total is not None, "the counts of all trained terms are 0"
        return self.total

    @property
    def padding(self) -> float:
        """The fraction of positions that are padding; 0 unless the model reports it."""
        known = any(term.name == PADDING for term in self.terms)
        return (self[PADDING] or 0.0) if known else 0.0

    def labelled(self) -> dict[str, float | None]:
        """Label -> mean of each term, followed by the total if several terms are trained."""
        means = {term.label: mean for term, mean in zip(self.terms, self.means, strict=True)}
        if sum(term.trained for term in self.terms) > 1:
            means["total loss"] = self.total
        return means

    def record(self) -> dict[str, float | None]:
        """`labelled` with the keys of metrics, such as ``lm_loss``."""
        return {label.replace(" ", "_"): mean for label, mean in self.labelled().items()}


class Totals:
    """Sums over a global batch: on the device, and copied to the host, where reading them waits.

    Args:
        sums, counts: the sum and the count of each term, float64 [terms].
        squares: the squared norm of the gradient sums, float64 []; None without gradients.
    """

    def __init__(
        self, terms: Sequence[LossTerm], sums: Tensor, counts: Tensor, squares: Tensor | None = None
    ):
        self.terms = terms
        self.sums = sums
        self.counts = counts
        self.squares = torch.zeros_like(sums[0]) if squares is None else squares
        self._reading = Reading(torch.cat([sums, counts, self.squares.view(1)]))

    @cached_property
    def losses(self) -> Losses:
        """The losses; on the meta device all of them are NaN, with counts of 1."""
        n, values = len(self.terms), self._values
        return Losses.of(self.terms, values[:n], values[n : 2 * n])

    @property
    def counted(self) -> int:
        """The first term's count."""
        return round(self._values[len(self.terms)])

    @property
    def norm(self) -> float:
        """Global norm of the gradient sums, loss scale included; 0 if the losses have no total."""
        return 0.0 if self.losses.total is None else math.sqrt(self._values[-1])

    def norm_on_device(self) -> Tensor:
        """The norm, float64 []; NaN if the step must be skipped for its losses or because it is empty."""
        trained = [i for i, term in enumerate(self.terms) if term.trained]
        means = [
            torch.where(self.counts[i] > 0, self.terms[i].coefficient * (self.sums[i] / self.counts[i]), 0.0)
            for i in trained
        ]
        counted = torch.stack([self.counts[i] for i in trained]).amax() > 0
        sound = counted & torch.stack(means).sum().isfinite()
        return torch.where(sound, self.squares.sqrt(), torch.nan)

    @property
    def _values(self) -> list[float]:
        n = len(self.terms)
        return self._reading.values or [math.nan] * n + [1.0] * n + [math.nan]
