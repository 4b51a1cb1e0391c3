"""The tensors of a checkpoint by their names there, at hand or read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

Weights = Mapping[str, Tensor]
"""The tensors of one model chunk on one rank, by their names there."""

Load = Callable[[], Tensor]
"""Read or join one tensor."""


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each loaded anew when it is asked for."""

    def __init__(self, loads: Mapping[str, Load]):
        self.loads = loads

    def __getitem__(self, name: str) -> Tensor:
        return self.loads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.loads)

    def __len__(self) -> int:
        return len(self.loads)
