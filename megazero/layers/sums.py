"""`Sums`: numbers that layers return besides hidden states, added up over a step's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Sums(NamedTuple):
    """Contributions of layers to a step's sums.

    Attributes:
        terms: float32 scalars by the names of loss terms, equal on all tensor-parallel ranks.
        tallies: by name, tensors without gradients that are added up, such as the tokens of each expert here.
    """

    terms: Mapping[str, Tensor] = _NOTHING
    tallies: Mapping[str, Tensor] = _NOTHING

    def plus(self, more: Sums) -> Sums:
        """The sums of both."""
        return Sums(_added(self.terms, more.terms), _added(self.tallies, more.tallies))


def _added(sums: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not more:
        return sums
    return {**sums, **{name: sums[name] + value if name in sums else value for name, value in more.items()}}
