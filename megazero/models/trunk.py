"""`Trunk`: the embedding and the layers, which all families share; a family adds its head and its loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import TypeVar

from torch import Tensor, nn

from megazero.layers.embedding import Embedding
from megazero.layers.inputs import AttentionCore, Deferred, LayerInputs
from megazero.layers.recompute import recompute_units, run_layers
from megazero.layers.rotary import RotaryOfColumns
from megazero.layers.rows import Rows
from megazero.layers.sums import Sums
from megazero.loss import LossTerm
from megazero.models.batch import M_contra
from megazero.models.chunk import EMBEDDING, Block, Slice, StagedChunk
from megazero.models.layer import kind_of, layer_of
from megazero.moe.losses import terms_of
from megazero.moe.mlp import MoEMLP
from megazero.moe.router import Router
from megazero.ops.positions import Positions, position_tensor
from megazero.pipeline.chunk import Boundary
from megazero.spec.experts import MoeSpec
from megazero.spec.model import ModelSpec

_Columns = TypeVar("_Columns", Positions, Tensor, Tensor | None)


class Trunk(StagedChunk[M_contra]):
    """The part of a transformer below its head, or a contiguous piece of it.

    A family derives from it, says which weights its `ties` are, and which loss terms of its `own_terms` its
    head adds to, and builds the head.

    Args:
        held: the part of the model that is here.
    """

    def __init__(self, held: Slice):
        super().__init__(held)
        self.embedding: Embedding | None = None
        if held.holds(EMBEDDING):
            self.embedding = Embedding(held.spec.embedding, held.vocab, held.placement)
        self.layers = nn.ModuleList(layer_of(number, held) for number in held.layers)
        parts = (layer.mlp for layer in held.spec.layers)
        self.reads_ids = any(isinstance(part, MoeSpec) and part.router.hashed for part in parts)
        self.units = recompute_units(len(self.layers), held.recompute)
        self.head = self.head_beside(None if self.embedding is None else self.embedding.word)
        self.mark_copied()

    @property
    @abstractmethod
    def own_terms(self) -> tuple[LossTerm, ...]:
        """The loss terms that the head adds to."""

    def routers(self) -> list[Router]:
        """The routers of the chunk's layers, in order."""
        return routers_of(self.layers)

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the head, then those of the routers."""
        router = self.spec.router
        return (*self.own_terms, *(() if router is None else terms_of(router)))

    def input_boundary(self, batch: M_contra) -> Boundary:
        """Hidden states between chunks, of this rank's rows: [s/cp, b, h], or of s/cp/tp of them."""
        b, s = batch.tokens.shape
        spread = self.placement.spread
        rows = spread.count(s * spread.cp.size)
        return Boundary((rows, b, self.spec.stream.width), self.hidden_dtype)

    def blocks(self) -> list[nn.Module]:
        """The blocks that this chunk runs, in order: embedding, layers, head."""
        return [block for block in (self.embedding, *self.layers, self.head) if block is not None]

    def hidden(
        self, batch: M_contra, hidden: Tensor | None = None, *, core: AttentionCore | None = None
    ) -> Tensor:
        """Hidden states after this chunk's layers, as `through` gives them."""
        return self.through(batch, hidden, core=core)[0]

    def through(
        self,
        batch: M_contra,
        hidden: Tensor | None = None,
        *,
        core: AttentionCore | None = None,
        deferred: Deferred | None = None,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Sums]:
        """Hidden states after this chunk's layers, [s, b, h] ([s/tp, b, h] under sequence parallelism), and
        what the layers add to the step's sums.

        Args:
            batch: the micro-batch.
            hidden: hidden states of the previous chunk; None if this one has the embedding.
            core: the attention core of this pass; None for the layers' own.
            deferred: collects the computation of weight gradients, which backward then leaves out.
            wanted: int64 [r, b], the rows that the head reads. If the last layer is here, and sees whole
                sequences, it computes no others, and the result is [r, b, h]. None for all.
        """
        inputs, embedded = self.inputs_of(batch, core, deferred)
        spread = inputs.rows.spread
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, embedded, inputs, batch.places.token_types)
        assert hidden is not None, "a chunk without an embedding starts from hidden states"
        if spread.parts.size > 1 or self.spec.router is not None:
            # A rank has its share of the rows, whichever are wanted, and routers see whole sequences.
            wanted = None
        return run_layers(
            list(self.layers), hidden, inputs, self.units, self.keeping, wanted, self._per_token
        )

    def inputs_of(
        self, batch: M_contra, core: AttentionCore | None = None, deferred: Deferred | None = None
    ) -> tuple[LayerInputs, Tensor]:
        """The inputs that a micro-batch gives to every layer, and the positions to embed, [b, s] or [s]."""
        spread, places = self.placement.spread, batch.places
        length = batch.tokens.shape[1] * spread.cp.size
        positions = range(length) if places.positions is None else places.positions
        embedded = places.embedded
        if embedded is None:
            embedded = position_tensor(positions, batch.tokens.device)
        rotary = RotaryOfColumns(self.spec.rotary, _rows_first(embedded), spread)
        rows = Rows(
            _rows_first(positions),
            places.documents,
            _rows_first(places.sample_keys),
            rotary(),
            spread,
            rotary if self.spec.rotary and spread.cp.size > 1 else None,
            batch.tokens if self.reads_ids else None,
        )
        return LayerInputs(rows, core, deferred, skipping=batch.skipping), embedded

    @cached_property
    def _per_token(self) -> frozenset[str]:
        """The names of the terms that are sums over tokens."""
        return frozenset(term.name for term in self.terms if term.over == "tokens")


def _rows_first(values: _Columns) -> _Columns:
    """[b, s] -> [s, b]; what has one dim, ranges and None stay as they are."""
    return values.t() if isinstance(values, Tensor) and values.dim() == 2 else values


def routers_of(layers: nn.ModuleList) -> list[Router]:
    """The routers of those layers that have experts."""
    return [part.router for part in layers.modules() if isinstance(part, MoEMLP)]


def trunk_blocks(spec: ModelSpec, layers: Iterable[float], head: Block) -> tuple[Block, ...]:
    """The blocks of a model of embedding, layers and head, by the FLOPs of each layer."""
    both = enumerate(zip(spec.layers, layers, strict=True))
    stack = (Block(number, kind_of(layer), flops, layer) for number, (layer, flops) in both)
    return (Block(EMBEDDING, Embedding.__name__, 0.0), *stack, head)
