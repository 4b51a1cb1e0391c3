"""What the trainer needs from a model: a list of blocks that a pipeline cuts into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from megazero.config.tree import ModelConfig
from megazero.layers import KeyValueStore, Placement
from megazero.models.batch import Batch
from megazero.moe import Router
from megazero.pipeline.chunk import Chunk


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
    """Which blocks of the model one pipeline chunk holds.

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


class ModelChunk(Chunk, Protocol):
    """A chunk of a model that can be built and laid out in memory; it is a `torch.nn.Module`."""

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that a tied head on this rank shares; None in a chunk without an embedding."""

    def blocks(self) -> list[nn.Module]:
        """The blocks that it runs, in order; each gathers its parameters together where they are sharded."""

    def routers(self) -> list[Router]:
        """The routers of its layers, in order; none without experts."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `torch.nn.Module.parameters`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `torch.nn.Module.named_parameters`."""


class LanguageModel(ModelChunk, Protocol):
    """A chunk of a model that can continue text, as generation runs it.

    Attributes:
        config: shape of the whole model.
        placement: where its layers live.
        vocab_size: number of tokens that it knows, without padding.
        head: hidden states [s, b, h] -> logits [s, b, v/tp]; None in a chunk without a head.
    """

    config: ModelConfig
    placement: Placement
    vocab_size: int
    head: nn.Module | None

    def hidden(self, batch: Batch, hidden: Tensor | None = None, *, cache: KeyValueStore | None) -> Tensor:
        """The hidden states after the chunk's layers; `cache` holds keys and values of earlier positions."""

    def without_sequence_parallelism(self) -> Any:
        """The same weights in a model that holds all positions on every rank.

        During generation a sequence is one token long and cannot be split over the tensor-parallel ranks.
        """
