"""`Part`: a box of a logical tensor, with the memory to write it from or to read it into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megazero.checkpoint.box import Box

WEIGHT = "weight"
RANDOM = "rng"
"""Kind of logical tensors [ranks, ...]: row r is the state of rank r's random generators."""
ROUTER = "router"
"""Kind of a router's expert biases [experts], which balancing moves from step to step."""

FP8 = "fp8"
"""Kind of the scaling state of fp8 linear layers: histories of maxima [steps, 3] and scales [3]."""


@dataclass(frozen=True)
class Key:
    """The name of a logical tensor.

    Attributes:
        name: the global name of a parameter or buffer.
        kind: ``weight``, or a state of the parameter such as ``exp_avg``.
    """

    name: str
    kind: str = WEIGHT

    def __str__(self) -> str:
        return self.name if self.kind == WEIGHT else f"{self.name}/{self.kind}"


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor, and its memory.

    Attributes:
        key: the logical tensor.
        shape: the shape of the whole logical tensor, without padding.
        box: the box.
        tensor: the memory, in the box's shape, with any strides, dtype and device.
        offloaded: whether the memory belongs to offloaded state, from which files are written without a copy.
    """

    key: Key
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    offloaded: bool = False

    @classmethod
    def whole(cls, key: Key, tensor: Tensor) -> Part:
        """A part that is the whole logical tensor."""
        return cls(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor)


class Source(Protocol):
    """Logical tensors that can be read in parts: a checkpoint, or another library's model seen as one."""

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """Logical tensor -> its shape."""

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts, converting to its dtype. Keys and shapes must be those in `shapes`.

        Raises:
            DamagedCheckpointError: the stored bytes have changed since they were written.
        """


def misfits(shapes: Mapping[Key, tuple[int, ...]], wanted: Mapping[Key, tuple[int, ...]]) -> list[str]:
    """A clause for each wanted logical tensor that `shapes` lacks or has in another shape."""
    wrong = []
    for key, shape in wanted.items():
        if key not in shapes:
            wrong.append(f"{key} is missing")
        elif tuple(shapes[key]) != tuple(shape):
            wrong.append(f"{key} has shape {list(shapes[key])}, not {list(shape)}")
    return wrong
