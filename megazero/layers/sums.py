"""`Sums`: the numbers that layers add up over a step's micro-batches, beside their hidden states."""

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
        tallies: tensors that are only added up, such as how many tokens each expert got here, by name.
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
