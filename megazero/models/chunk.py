"""The trainer's interface to a model: blocks, which a pipeline cuts into chunks, and tied weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.inputs import AttentionCore
from megazero.layers.placement import Placement
from megazero.layers.recompute import InputKeeping
from megazero.moe.router import Router
from megazero.mpu.param_spec import spec_of
from megazero.ops.cross_entropy import TokenLosses, VocabularySlice, vocab_parallel_losses
from megazero.pipeline.chunk import B_contra, Boundary, Chunk
from megazero.spec.model import ModelSpec

Part = int | str
"""A part of a model: a layer, by its number along the model, or another block, by its name."""

EMBEDDING, HEAD = "embedding", "head"
"""The parts other than layers."""


@dataclass(frozen=True)
class Block:
    """One block of a model, which is a list of them; a pipeline may cut between any two.

    Attributes:
        part: the part of the model.
        kind: name of its type, which ``--pipeline-partition type:REGEX`` matches.
        flops: FLOPs of its matrix products for one token, forward only.
        own: a value that differs between blocks of one kind that cost different times.
    """

    part: Part
    kind: str
    flops: float
    own: object = None


@dataclass(frozen=True)
class Tie:
    """A weight that several blocks use.

    Attributes:
        weight: its global name, which is its name in the first block.
        parts: the blocks that use it. Blocks on one stage share it; each other stage holds a copy.
    """

    weight: str
    parts: tuple[Part, ...]


WORD = "embedding.word.weight"
"""The global name of the weight that a tied head shares."""

WORD_TIE = Tie(WORD, (EMBEDDING, HEAD))


@dataclass(frozen=True)
class Slice:
    """The part of a model that a chunk holds, with what is needed to build it.

    Attributes:
        spec: the whole model.
        vocab: number of vocabulary entries (without padding, with padding).
        placement: ranks, dtype and device.
        recompute: what backward recomputes.
        parts: the blocks held here, contiguous in the model; None for all of them.
        tied: name -> weight, for weights that this chunk shares with another chunk on this rank.
        copied: names of tied weights of which other stages hold copies.
    """

    spec: ModelSpec
    vocab: tuple[int, int]
    placement: Placement
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    parts: tuple[Part, ...] | None = None
    tied: Mapping[str, nn.Parameter] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()

    def holds(self, part: Part) -> bool:
        """Whether this chunk has a block."""
        return self.parts is None or part in self.parts

    @property
    def layers(self) -> list[int]:
        """The numbers of this chunk's layers."""
        return [number for number in range(len(self.spec.layers)) if self.holds(number)]


class ModelChunk(nn.Module, Chunk[B_contra]):
    """A chunk of a model as a module, with its blocks, routers and parameters."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The chunk's blocks in order; the sharded parameters of a block are gathered together."""

    @abstractmethod
    def routers(self) -> list[Router]:
        """The routers of the chunk's layers, in order; empty without experts."""

    def weight(self, name: str) -> nn.Parameter:
        """Return the parameter of this global name, which the chunk must have."""
        return next(p for p in self.parameters() if spec_of(p).name == name)


class StagedChunk(ModelChunk[B_contra]):
    """A chunk that inference can run (see `StagedModel`). Only the last chunk has the head.

    Args:
        held: the part of the model to build.
    """

    head: nn.Module | None

    def __init__(self, held: Slice):
        super().__init__()
        self.held = held
        self.spec, self.placement, self.recompute = held.spec, held.placement, held.recompute
        self.vocab_size = held.vocab[0]
        self.keeping = InputKeeping.of(held.recompute, held.placement)

    @classmethod
    def ties(cls, spec: ModelSpec) -> tuple[Tie, ...]:
        """The tied weights of such a model: the embedding's, if the head uses it."""
        return (WORD_TIE,) if spec.head.tied else ()

    @abstractmethod
    def build_head(self, tied: nn.Parameter | None) -> nn.Module:
        """Build the block after the layers; `tied` is the embedding's weight if the head uses it."""

    def head_beside(self, word: nn.Parameter | None) -> nn.Module | None:
        """Build the head if this chunk has it; `word` is the embedding's weight if this chunk has that."""
        if not self.held.holds(HEAD):
            return None
        shared = WORD in (tie.weight for tie in self.ties(self.spec))
        return self.build_head(self.held.tied.get(WORD, word if shared else None))

    def mark_copied(self) -> None:
        """Mark the weights of which other stages hold copies, in their specs."""
        for name in self.held.copied - self.held.tied.keys():
            for parameter in self.parameters():
                if spec_of(parameter).name == name:
                    vars(parameter)["spec"] = replace(spec_of(parameter), shared=True)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""
        return torch.float32 if self.spec.stream.fp32 else self.placement.dtype

    def output_boundary(self, batch: B_contra) -> Boundary:
        """The boundary after the chunk; all boundaries of a micro-batch are alike."""
        return self.input_boundary(batch)

    def token_losses(self, logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> TokenLosses:
        """The losses of each position, float32 [s, b], from logits [s, b, v/tp] and labels [b, s].

        overwrite: whether backward may overwrite the logits; nothing else may then read them.
        """
        target, part = labels.t().contiguous(), self.slice_of(logits)
        return vocab_parallel_losses(logits, target, part, overwrite=overwrite)

    def slice_of(self, logits: Tensor) -> VocabularySlice:
        """The slice of the vocabulary to which logits [..., v/tp] belong."""
        tp = self.placement.tp
        return VocabularySlice(tp, tp.rank * logits.shape[-1], self.vocab_size)

    @abstractmethod
    def hidden(
        self, batch: B_contra, hidden: Tensor | None = None, *, core: AttentionCore | None = None
    ) -> Tensor:
        """Compute hidden states after this chunk's layers from those of the previous chunk.

        `core` replaces the layers' attention core in this pass.
        """
