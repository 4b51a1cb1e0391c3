"""`Trunk`: embedding and layers, shared by GPT, BERT and classifiers, which add their heads and losses."""

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
    """Embedding, layers and a family's head, or a contiguous part of them.

    A family defines its `ties`, its loss terms (`own_terms`) and its head (`build_head`).
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
        """The loss terms of the head."""

    def routers(self) -> list[Router]:
        """The routers of the chunk's layers, in order."""
        return routers_of(self.layers)

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the head, then those of the routers."""
        router = self.spec.router
        return (*self.own_terms, *(() if router is None else terms_of(router)))

    def input_boundary(self, batch: M_contra) -> Boundary:
        """This rank's hidden states: [s/cp, b, h], or [s/cp/tp, b, h] under sequence parallelism."""
        b, s = batch.tokens.shape
        spread = self.placement.spread
        rows = spread.count(s * spread.cp.size)
        return Boundary((rows, b, self.spec.stream.width), self.hidden_dtype)

    def blocks(self) -> list[nn.Module]:
        """The blocks of this chunk, in order: embedding, layers, head."""
        return [block for block in (self.embedding, *self.layers, self.head) if block is not None]

    def hidden(
        self, batch: M_contra, hidden: Tensor | None = None, *, core: AttentionCore | None = None
    ) -> Tensor:
        """The hidden states that `through` returns."""
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
        """Run this chunk's layers; return hidden states [s, b, h] (s/tp under sequence parallelism) and sums.

        Args:
            hidden: hidden states of the previous chunk; None if this chunk has the embedding.
            core: replaces the layers' attention core in this pass.
            deferred: the list to which backward appends weight gradients; None if it computes them.
            wanted: int64 [r, b], the rows that the head reads; None for all. If this chunk has the last
                layer, and ranks do not share sequences, it computes only these rows: [r, b, h].
        """
        inputs, embedded = self.inputs_of(batch, core, deferred)
        spread = inputs.rows.spread
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, embedded, inputs, batch.places.token_types)
        assert hidden is not None, "a chunk without an embedding starts from hidden states"
        if spread.parts.size > 1 or self.spec.router is not None:
            # A rank has its own part of the rows, wanted or not, and routers need whole sequences.
            wanted = None
        return run_layers(
            list(self.layers), hidden, inputs, self.units, self.keeping, wanted, self._per_token
        )

    def inputs_of(
        self, batch: M_contra, core: AttentionCore | None = None, deferred: Deferred | None = None
    ) -> tuple[LayerInputs, Tensor]:
        """Make the inputs of every layer, and the positions to embed, int64 [b, s] or [s]."""
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
        """The names of the loss terms that are sums over tokens."""
        return frozenset(term.name for term in self.terms if term.over == "tokens")


def _rows_first(values: _Columns) -> _Columns:
    """Transpose [b, s] to [s, b]; vectors, ranges and None stay as they are."""
    return values.t() if isinstance(values, Tensor) and values.dim() == 2 else values


def routers_of(layers: nn.ModuleList) -> list[Router]:
    """The routers of the layers that have experts, in order."""
    return [part.router for part in layers.modules() if isinstance(part, MoEMLP)]


def trunk_blocks(spec: ModelSpec, layers: Iterable[float], head: Block) -> tuple[Block, ...]:
    """The blocks of a model of embedding, layers and head; `layers` are the FLOPs of each layer."""
    both = enumerate(zip(spec.layers, layers, strict=True))
    stack = (Block(number, kind_of(layer), flops, layer) for number, (layer, flops) in both)
    return (Block(EMBEDDING, Embedding.__name__, 0.0), *stack, head)
