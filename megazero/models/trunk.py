"""`Trunk`: the embedding and the layers, which all families share; a family adds its head and its loss."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from megazero.config.derive import experts_of
from megazero.config.tree import ModelConfig, RecomputeConfig
from megazero.layers import (
    MLP,
    AttentionCore,
    Deferred,
    Embedding,
    InputKeeping,
    LayerInputs,
    Placement,
    Rows,
    SelfAttention,
    Sums,
    TransformerLayer,
    recompute_units,
    run_layers,
)
from megazero.loss import LossTerm
from megazero.models.batch import M_contra
from megazero.models.chunk import ChunkSpan, ModelChunk
from megazero.moe import MoEMLP, Router, terms_of
from megazero.mpu import spec_of
from megazero.ops.positions import Positions, position_tensor
from megazero.ops.rotary import rotary_table

_Columns = TypeVar("_Columns", Positions, Tensor, Tensor | None)


class Trunk(ModelChunk[M_contra]):
    """The part of a transformer below its head, or a contiguous piece of it.

    A family derives from it, says whether attention is `causal`, which loss terms of its `own_terms` its head
    adds to, and how many `token_types` it knows, and sets `head`.

    Args:
        config: shape of the whole model.
        vocab: number of vocabulary entries (without padding, with padding).
        placement: ranks, dtype and device.
        recompute: what backward recomputes.
        span: the blocks held here; None holds all of them.
        token_types: kinds of tokens that have a vector of their own; 0 for none.
    """

    causal: ClassVar[bool]

    def __init__(
        self,
        config: ModelConfig,
        vocab: tuple[int, int],
        placement: Placement,
        recompute: RecomputeConfig | None = None,
        span: ChunkSpan | None = None,
        *,
        token_types: int = 0,
    ):
        super().__init__()
        recompute = recompute or RecomputeConfig()
        self.span = span = span or ChunkSpan(range(config.num_layers))
        self.config = config
        self.placement = placement
        self.recompute = recompute
        self.keeping = InputKeeping.of(recompute, placement)
        self.vocab_size = vocab[0]
        self.embedding = Embedding(config, *vocab, placement, token_types) if span.embedding else None
        if self.embedding is not None and span.shared:
            vars(self.embedding.word)["spec"] = replace(spec_of(self.embedding.word), shared=True)
        self.layers = nn.ModuleList(self._layer(i) for i in span.layers)
        self.units = recompute_units(len(span.layers), recompute)
        self.head: nn.Module | None = None

    def _layer(self, i: int) -> TransformerLayer:
        """Layer `i`: attention and an MLP."""
        selective = self.recompute.granularity == "selective"
        attention = SelfAttention(i, self.config, self.placement, causal=self.causal, recompute=selective)
        kind = MoEMLP if experts_of(self.config, i) else MLP
        mlp = kind(i, self.config, self.placement)
        return TransformerLayer(i, self.config, self.placement, attention, mlp)

    @property
    @abstractmethod
    def own_terms(self) -> tuple[LossTerm, ...]:
        """The loss terms that the head adds to."""

    def routers(self) -> list[Router]:
        """The routers of the chunk's layers, in order."""
        return [layer.mlp.router for layer in self.layers if isinstance(layer.mlp, MoEMLP)]

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the head, then those of the routers."""
        return (*self.own_terms, *(terms_of(self.config) if self.config.num_experts else ()))

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The embedding's weight, which a tied head shares; None if this chunk has no embedding."""
        return None if self.embedding is None else self.embedding.word

    def weight_for_head(self, tied: nn.Parameter | None) -> nn.Parameter | None:
        """The embedding's weight for the head of this chunk; None if the head needs a weight of its own.

        `tied` is the weight if another chunk on this rank holds it.
        """
        if tied is None and not self.config.untie_embeddings_and_output_weights:
            return self.tied_weight
        return tied

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""
        return torch.float32 if self.config.fp32_residual_connection else self.placement.dtype

    def hidden_shape(self, batch: M_contra) -> tuple[int, int, int]:
        """The shape of hidden states between chunks: [s, b, h], or [s/tp, b, h] if sequence-parallel."""
        b, s = batch.tokens.shape
        return self.placement.spread.count(s), b, self.config.hidden_size

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
        positions = range(batch.tokens.shape[1]) if batch.positions is None else batch.positions
        embedded = batch.position_ids
        if embedded is None:
            embedded = position_tensor(positions, batch.tokens.device)
        rows = Rows(
            _rows_first(positions),
            batch.document_ids,
            _rows_first(batch.sample_keys),
            self._rotary(embedded),
            self.placement.spread,
        )
        inputs = LayerInputs(rows, core, deferred, skipping=batch.skipping)
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, embedded, inputs, batch.token_types)
        assert hidden is not None, "a chunk without an embedding starts from hidden states"
        if self.placement.sequence_parallel or self.config.num_experts:
            # A rank has its share of the rows, whichever are wanted, and routers see whole sequences.
            wanted = None
        return run_layers(
            list(self.layers), hidden, inputs, self.units, self.keeping, wanted, self._per_token
        )

    @cached_property
    def _per_token(self) -> frozenset[str]:
        """The names of the terms that are sums over tokens."""
        return frozenset(term.name for term in self.terms if term.over == "tokens")

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        dim = int(self.config.head_dim * self.config.rotary_percent)
        return rotary_table(_rows_first(positions), dim, self.config.rotary_base)


def _rows_first(values: _Columns) -> _Columns:
    """[b, s] -> [s, b]; what has one dim, ranges and None stay as they are."""
    return values.t() if isinstance(values, Tensor) and values.dim() == 2 else values
