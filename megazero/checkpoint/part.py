"""`Part`: a box of a named logical tensor, and the memory that it is written from or read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megazero.checkpoint.box import Box

WEIGHT = "weight"
RANDOM = "rng"
"""Kind of the logical tensors [ranks, ...] whose row r is the state of rank r's generators."""
ROUTER = "router"
"""Kind of what routers remember from step to step besides their weights, [experts]."""

FP8 = "fp8"
"""Kind of what linear layers with 8-bit products remember: histories [steps, 3] and scales [3]."""


@dataclass(frozen=True)
class Key:
    """Identifies a logical tensor: the global name of a parameter (or buffer), and which of its tensors.

    `kind` is ``weight``, or names an optimizer state such as ``exp_avg``.
    """

    name: str
    kind: str = WEIGHT

    def __str__(self) -> str:
        return self.name if self.kind == WEIGHT else f"{self.name}/{self.kind}"


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor.

    Attributes:
        key: the logical tensor.
        shape: the shape of the whole logical tensor, without padding.
        box: the part of it.
        tensor: the memory, in the box's shape, with any strides, dtype and device.
        offloaded: whether the memory is where offloaded state is kept; it is written from there, not copied.
    """

    key: Key
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    offloaded: bool = False

    @classmethod
    def whole(cls, key: Key, tensor: Tensor) -> Part:
        """All of a logical tensor."""
        return cls(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor)


class Source(Protocol):
    """Logical tensors that can be read in parts: a checkpoint, or a foreign model seen as one."""

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """The shapes of everything that it holds."""

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts, converted to its dtype. All keys must be in `shapes`, in that shape.

        Raises:
            DamagedCheckpointError: the stored bytes are not those that were written.
        """


def misfits(held: Mapping[Key, tuple[int, ...]], wanted: Mapping[Key, tuple[int, ...]]) -> list[str]:
    """A clause for each wanted logical tensor that is missing or has another shape."""
    wrong = []
    for key, shape in wanted.items():
        if key not in held:
            wrong.append(f"{key} is missing")
        elif tuple(held[key]) != tuple(shape):
            wrong.append(f"{key} has shape {list(held[key])}, not {list(shape)}")
    return wrong
