"""State that each replica has a copy of its own of: stored as a row for each, read by any number of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part, Source


class ReplicaRows:
    """A source whose tensors [replicas, ...] have as many rows as those who read them.

    As many replicas as were saved get their own rows back. Any other number of replicas all get the mean of
    the saved rows: what the replicas' messages left out enters their mean, which is then what it would have
    been.

    Args:
        source: the checkpoint.
        parts: all that is to be read.
        kinds: the kinds with a row for each replica.

    Attributes:
        shapes: the shapes of everything that it holds.
    """

    def __init__(self, source: Source, parts: Sequence[Part], kinds: Collection[str]):
        self._source = source
        shapes = {key: tuple(shape) for key, shape in source.shapes.items()}
        self._saved: dict[Key, int] = {}
        for part in (part for part in parts if part.key.kind in kinds):
            rows, *rest = shapes.get(part.key) or (0,)
            if rows not in (0, part.shape[0]) and rest == list(part.shape[1:]):
                self._saved[part.key], shapes[part.key] = rows, part.shape
        self.shapes: Mapping[Key, tuple[int, ...]] = MappingProxyType(shapes)

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`. Takes the memory of one row of one part, in fp64."""
        straight: list[Part] = []
        averaged: list[Part] = []
        for part in parts:
            (averaged if part.key in self._saved else straight).append(part)
        self._source.read(straight)
        for part in averaged:
            rows, inner = self._saved[part.key], part.shape[1:]
            row = torch.empty(1, *part.box.shape[1:], dtype=part.tensor.dtype)
            total = torch.zeros(row.shape, dtype=torch.float64)
            for number in range(rows):
                box = Box((number, *part.box.offset[1:]), (1, *part.box.shape[1:]))
                self._source.read([Part(part.key, (rows, *inner), box, row)])
                total += row
            part.tensor.copy_(total / rows)


_: type[Source] = ReplicaRows
