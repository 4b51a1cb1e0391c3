"""The losses of the words that a head predicts: the rows of a table, which all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from megazero.loss import LossTerm
from megazero.ops.cross_entropy import TokenLosses
from megazero.spec.model import HeadSpec

WORD_LOSSES: Mapping[str, Callable[[TokenLosses], Tensor]] = MappingProxyType(
    {
        "lm": lambda losses: losses.loss,
        "logit_z": lambda losses: losses.log_z.square(),
    }
)
"""Loss term -> the loss of each token; the first is every head's, others are those that its spec weighs."""


def word_terms(head: HeadSpec) -> tuple[LossTerm, ...]:
    """The loss terms of a head's words; what counts for the first counts for all."""
    return (LossTerm("lm"), *(LossTerm(name, weight, over="lm") for name, weight in head.losses))


def word_sums(
    head: HeadSpec, losses: TokenLosses, weighted: Callable[[Tensor], Tensor] = lambda values: values
) -> dict[str, Tensor]:
    """The sums of these terms, float32 scalars; `weighted` multiplies values by the weights of tokens."""
    return {term.name: weighted(WORD_LOSSES[term.name](losses)).sum() for term in word_terms(head)}
