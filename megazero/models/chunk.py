"""The trainer's view of a model: a list of blocks that a pipeline cuts into chunks, and their ties."""

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
"""The parts beside the layers."""


@dataclass(frozen=True)
class Block:
    """One of the blocks that a model consists of, in order; a pipeline may cut between any two.

    Attributes:
        part: the part of the model that it is.
        kind: name of its type, which ``--pipeline-partition type:REGEX`` matches.
        flops: floating-point operations of its matrix products for one token, forward only.
        own: whatever else tells it from blocks of its kind.
    """

    part: Part
    kind: str
    flops: float
    own: object = None


@dataclass(frozen=True)
class Tie:
    """A weight that several blocks use.

    Attributes:
        weight: its global name, under which the first of them holds it.
        parts: the blocks that use it. One on another stage holds a copy; one on the same stage shares it.
    """

    weight: str
    parts: tuple[Part, ...]


WORD = "embedding.word.weight"
"""The global name of the weight that a tied head shares."""

WORD_TIE = Tie(WORD, (EMBEDDING, HEAD))


@dataclass(frozen=True)
class Slice:
    """The part of a model that a chunk holds, and where.

    Attributes:
        spec: the whole model.
        vocab: number of vocabulary entries (without padding, with padding).
        placement: ranks, dtype and device.
        recompute: what backward recomputes.
        parts: the blocks held here, which follow each other in the model; None for all of them.
        tied: weights by name that blocks here share with another chunk on this rank.
        copied: names of the tied weights that other stages hold too.
    """

    spec: ModelSpec
    vocab: tuple[int, int]
    placement: Placement
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    parts: tuple[Part, ...] | None = None
    tied: Mapping[str, nn.Parameter] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()

    def holds(self, part: Part) -> bool:
        """Whether a block is held here."""
        return self.parts is None or part in self.parts

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers held here."""
        return [number for number in range(len(self.spec.layers)) if self.holds(number)]


class ModelChunk(nn.Module, Chunk[B_contra]):
    """A chunk of a model that can be built and laid out in memory."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The blocks that it runs, in order; each gathers its parameters together where they are sharded."""

    @abstractmethod
    def routers(self) -> list[Router]:
        """The routers of its layers, in order; none without experts."""

    def weight(self, name: str) -> nn.Parameter:
        """The parameter of this global name, which must be here."""
        return next(p for p in self.parameters() if spec_of(p).name == name)


class StagedChunk(ModelChunk[B_contra]):
    """A chunk that inference can run, as `StagedModel` does; another one may have the head.

    Args:
        held: the part of the model that is here.
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
        """The weights that several blocks use: the embedding's, if the head shares it."""
        return (WORD_TIE,) if spec.head.tied else ()

    @abstractmethod
    def build_head(self, tied: nn.Parameter | None) -> nn.Module:
        """The block that follows the layers; `tied` is the embedding's weight if it shares that."""

    def head_beside(self, word: nn.Parameter | None) -> nn.Module | None:
        """The head, if it is here; `word` is the embedding's weight, if that is."""
        if not self.held.holds(HEAD):
            return None
        shared = WORD in (tie.weight for tie in self.ties(self.spec))
        return self.build_head(self.held.tied.get(WORD, word if shared else None))

    def mark_copied(self) -> None:
        """Say of the weights here that other stages hold copies of them."""
        for name in self.held.copied - self.held.tied.keys():
            for parameter in self.parameters():
                if spec_of(parameter).name == name:
                    vars(parameter)["spec"] = replace(spec_of(parameter), shared=True)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""
        return torch.float32 if self.spec.stream.fp32 else self.placement.dtype

    def gives(self, batch: B_contra) -> Boundary:
        """As `takes`: all boundaries of a micro-batch are alike."""
        return self.takes(batch)

    def token_losses(self, logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> TokenLosses:
        """The losses of each position, float32 [s, b], from logits [s, b, v/tp] and labels [b, s].

        overwrite: whether backward may write over the logits, which nothing else may then read.
        """
        target, part = labels.t().contiguous(), self.slice_of(logits)
        return vocab_parallel_losses(logits, target, part, overwrite=overwrite)

    def slice_of(self, logits: Tensor) -> VocabularySlice:
        """The slice of the vocabulary that logits [..., v/tp] are of."""
        tp = self.placement.tp
        return VocabularySlice(tp, tp.rank * logits.shape[-1], self.vocab_size)

    @abstractmethod
    def hidden(
        self, batch: B_contra, hidden: Tensor | None = None, *, core: AttentionCore | None = None
    ) -> Tensor:
        """Hidden states after this chunk's layers, from those of the previous chunk; `core` is the attention
        core of this pass, None the layers' own."""
