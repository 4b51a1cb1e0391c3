"""The trainer's view of a model: a list of blocks that a pipeline cuts into chunks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import nn

from megazero.moe import Router
from megazero.pipeline.chunk import B_contra, Chunk


@dataclass(frozen=True)
class Block:
    """One of the blocks that a model consists of.

    Attributes:
        kind: name of its type, which ``--pipeline-partition type:REGEX`` matches.
        flops: floating-point operations of its matrix products for one token, forward only.
    """

    kind: str
    flops: float


@dataclass(frozen=True)
class ChunkSpan:
    """The blocks of the model that one pipeline chunk holds.

    Attributes:
        layers: the layers, by their numbers along the model.
        embedding: whether the chunk begins with the block that precedes the layers.
        head: whether the chunk ends with the block that follows the layers.
        shared: whether a weight of its embedding is tied to a head on another stage.
    """

    layers: range
    embedding: bool = True
    head: bool = True
    shared: bool = False


class ModelChunk(nn.Module, Chunk[B_contra]):
    """A chunk of a model that can be built and laid out in memory."""

    @property
    @abstractmethod
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that a tied head on this rank shares; None in a chunk without an embedding."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The blocks that it runs, in order; each gathers its parameters together where they are sharded."""

    @abstractmethod
    def routers(self) -> list[Router]:
        """The routers of its layers, in order; none without experts."""
