"""State that differs between replicas: stored as one row per replica, read by any number of replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part, Source


class ReplicaRows:
    """A source that presents tensors [saved replicas, ...] as [replicas, ...], for the replicas that read.

    As many replicas as saved get their own rows back. Any other number of replicas all get the mean of the
    saved rows. These rows are errors of compressed messages, of which only the replicas' mean enters the
    weights, and the mean stays the same.

    Args:
        source: the checkpoint.
        parts: all parts that will be read.
        kinds: the kinds with a row for each replica.

    Attributes:
        shapes: logical tensor -> its shape.
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
        """Fill the memory of parts; see `Source`. Holds one row of one part in fp64 besides."""
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
