"""T5: embedding, encoder, decoder, head.

The blocks form one list, which a pipeline may cut anywhere. A boundary has the hidden states of both texts,
[s + t, b, h]: the encoder's layers pass the decoder's embeddings through, and the decoder's layers pass the
encoder's output through. So one stage embeds both texts, and all boundaries have the same shape.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.account.flops import layer_flops, logits_flops
from megazero.config.tree.config import Config
from megazero.layers.attention_cores import CachedCore
from megazero.layers.embedding import Embedding
from megazero.layers.inputs import AttentionCore, Deferred
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.recompute import Unit, recompute_units, run_layers
from megazero.layers.rows import Rows
from megazero.layers.transformer import TransformerLayer
from megazero.loss import LossTerm
from megazero.models.chunk import EMBEDDING, HEAD, Block, Slice, StagedChunk, Tie
from megazero.models.gpt import Head
from megazero.models.pairs.batch import PairBatch
from megazero.models.pairs.bias import TABLES, RelativeBiases
from megazero.models.pairs.layers import DecoderLayer, PairInputs, PairStore, layer_of
from megazero.models.word_losses import word_sums, word_terms
from megazero.moe.router import Router
from megazero.mpu.rng import site_key
from megazero.ops.counter_random import derive
from megazero.ops.positions import position_tensor
from megazero.pipeline.chunk import Boundary, ChunkResult
from megazero.spec.model import EmbeddingSpec, LayerSpec, ModelSpec
from megazero.spec.resolve import model_spec

BIASES, ENCODER_NORM = "biases", "encoder_norm"
"""The blocks that only T5 has."""


class PairEmbedding(nn.Module):
    """The embedding of both texts of a micro-batch by one table: [s, b, h] and [t, b, h]."""

    def __init__(self, spec: EmbeddingSpec, vocab: tuple[int, int], placement: Placement):
        super().__init__()
        self.table = Embedding(spec, vocab, placement)

    @property
    def word(self) -> nn.Parameter:
        """The table's weight."""
        return self.table.word

    def forward(self, batch: PairBatch, encoder: PairInputs, decoder: PairInputs) -> tuple[Tensor, Tensor]:
        return self._embed(batch.tokens, encoder), self._embed(batch.decoder.tokens, decoder)

    def _embed(self, tokens: Tensor, inputs: PairInputs) -> Tensor:
        """Embed tokens [b, s] at the positions of their rows."""
        embedded: Tensor = self.table(tokens, position_tensor(inputs.rows.positions, tokens.device), inputs)
        return embedded


def t5_blocks(config: Config, padded_vocab: int) -> tuple[Block, ...]:
    """The blocks of a T5 of this shape, with FLOPs per token of the encoder.

    The decoder has t tokens for s of the encoder, so its FLOPs count t / s. Each of its layers also computes
    keys and values of the encoder's rows (2 h 2 k FLOPs) and attends to all s of them.
    """
    spec = model_spec(config.model)
    hidden, share = spec.stream.width, spec.decoder_length / spec.length

    def layer(number: int, own: LayerSpec) -> Block:
        if own.cross is None:
            return Block(number, TransformerLayer.__name__, layer_flops(own, spec.length))
        query, key = (n * own.cross.head_dim for n in (own.cross.heads, own.cross.groups))
        crossed = 4 * hidden * key + share * (4 * hidden * query + 4 * spec.length * query)
        return Block(number, DecoderLayer.__name__, share * layer_flops(own, spec.decoder_length) + crossed)

    layers = [layer(number, own) for number, own in enumerate(spec.layers)]
    biases = [] if spec.relative is None else [Block(BIASES, RelativeBiases.__name__, 0.0)]
    return (
        Block(EMBEDDING, PairEmbedding.__name__, 0.0),
        *biases,
        *layers[: spec.encoder_layers],
        Block(ENCODER_NORM, Norm.__name__, 0.0),
        *layers[spec.encoder_layers :],
        Block(HEAD, Head.__name__, share * logits_flops(hidden, padded_vocab)),
    )


class T5(StagedChunk[PairBatch]):
    """An encoder and a decoder (Raffel et al. 2020), or a part of them."""

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The losses of the decoder's words."""
        return word_terms(self.spec.head)

    def __init__(self, held: Slice):
        super().__init__(held)
        spec, placement = held.spec, held.placement
        self.embedding: PairEmbedding | None = None
        if held.holds(EMBEDDING):
            self.embedding = PairEmbedding(spec.embedding, held.vocab, placement)
        self.biases = self._biases()
        again, tiles = held.recompute.again("core_attn"), held.recompute.mlp_tiles
        layers = [layer_of(n, spec.layers[n], placement, recompute=again, tiles=tiles) for n in held.layers]
        self.encoder = nn.ModuleList(layer for layer in layers if not isinstance(layer, DecoderLayer))
        self.decoder = nn.ModuleList(layer for layer in layers if isinstance(layer, DecoderLayer))
        self.units = self._units()
        self.encoder_norm: Norm | None = None
        if held.holds(ENCODER_NORM):
            self.encoder_norm = Norm(ENCODER_NORM, spec.norm, placement)
        self.head = self.head_beside(None if self.embedding is None else self.embedding.word)
        self.mark_copied()

    def _units(self) -> tuple[list[Unit], list[Unit]]:
        """The recompute units of the encoder's and of the decoder's layers.

        They are the units of all layers, cut between encoder and decoder.
        """
        first, both = len(self.encoder), len(self.encoder) + len(self.decoder)
        units = recompute_units(both, self.recompute)

        def within(stack: range) -> list[Unit]:
            spans = (
                (range(max(span.start, stack.start), min(span.stop, stack.stop)), again)
                for span, again in units
            )
            return [(range(s.start - stack.start, s.stop - stack.start), again) for s, again in spans if s]

        return within(range(first)), within(range(first, both))

    def _biases(self) -> RelativeBiases | None:
        held = self.held
        if held.spec.relative is None or not (
            held.holds(BIASES) or held.copied.union(held.tied).intersection(TABLES)
        ):
            return None
        biases = RelativeBiases(held.spec, held.placement, original=held.holds(BIASES))
        biases.encoder = held.tied.get(TABLES[0], biases.encoder)
        biases.decoder = held.tied.get(TABLES[1], biases.decoder)
        return biases

    @classmethod
    def ties(cls, spec: ModelSpec) -> tuple[Tie, ...]:
        """The tied weights: the embedding's, and the relative biases, which every stage has."""
        word = super().ties(spec)
        if spec.relative is None:
            return word
        everywhere = (EMBEDDING, BIASES, *range(len(spec.layers)), ENCODER_NORM, HEAD)
        return (*word, *(Tie(table, everywhere) for table in TABLES))

    def build_head(self, tied: nn.Parameter | None) -> Head:
        """Build the norm and the projection."""
        return Head(self.spec.head, self.held.vocab, self.placement, tied)

    def blocks(self) -> list[nn.Module]:
        """The blocks of this chunk, in order."""
        ends = (self.embedding, self.biases, *self.encoder, self.encoder_norm, *self.decoder, self.head)
        return [block for block in ends if block is not None]

    def routers(self) -> list[Router]:
        """No routers: T5 has no experts."""
        return []

    def input_boundary(self, batch: PairBatch) -> Boundary:
        """Hidden states of both texts, [s + t, b, h], or this rank's rows of them."""
        rows = sum(self._rows(batch))
        return Boundary((rows, len(batch.tokens), self.spec.stream.width), self.hidden_dtype)

    def _rows(self, batch: PairBatch) -> tuple[int, int]:
        count = self.placement.spread.count
        return count(batch.tokens.shape[1]), count(batch.decoder.tokens.shape[1])

    def forward(
        self, batch: PairBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> Tensor:
        """Compute the decoder's logits [t, b, v/tp] from the previous chunk's hidden states."""
        assert self.head is not None, "only a chunk with the head has logits"
        logits: Tensor = self.head(self.through(batch, hidden, deferred=deferred)[1], deferred)
        return logits

    def run(
        self, batch: PairBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or with the head the loss (see `Chunk.run`).

        ``lm`` is the sum of weighted cross-entropies in nats, a float32 scalar.
        """
        if self.head is None:
            return ChunkResult(torch.cat(self.through(batch, hidden, deferred=deferred)))
        logits = self(batch, hidden, deferred=deferred)
        losses = self.token_losses(logits, batch.decoder.learnt.labels, overwrite=True)
        return ChunkResult(None, word_sums(self.spec.head, losses, batch.decoder.learnt.weighted))

    def hidden(
        self, batch: PairBatch, hidden: Tensor | None = None, *, core: AttentionCore | None = None
    ) -> Tensor:
        """Compute hidden states of both texts after this chunk's layers, [s + t, b, h].

        With a cache (`CachedCore`), only the first call has the encoder's text; later ones have s = 0.
        """
        store = core.store if isinstance(core, CachedCore) else None
        assert store is None or isinstance(store, PairStore), "the cache of T5 must be a `PairStore`"
        return torch.cat(self.through(batch, hidden, store=store))

    def through(
        self,
        batch: PairBatch,
        hidden: Tensor | None = None,
        *,
        deferred: Deferred | None = None,
        store: PairStore | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute hidden states of the encoder and of the decoder after this chunk's layers.

        Args:
            hidden: [s + t, b, h] from the previous chunk; None if this chunk has the embedding.
            deferred: the list to which backward appends weight gradients; None if it computes them.
        """
        encoder, decoder = self._inputs(batch, deferred, store)
        if self.embedding is not None:
            encoded, decoded = self.embedding(batch, encoder, decoder)
        else:
            assert hidden is not None, "a chunk without an embedding starts from hidden states"
            encoded, decoded = hidden.split(self._rows(batch))
        if len(encoded):
            encoded = self._stack(self.encoder, self.units[0], encoded, encoder)
            if self.encoder_norm is not None:
                encoded = self.encoder_norm(encoded)
        decoded = self._stack(self.decoder, self.units[1], decoded, replace(decoder, encoded=encoded))
        return encoded, decoded

    def _inputs(
        self, batch: PairBatch, deferred: Deferred | None, store: PairStore | None
    ) -> tuple[PairInputs, PairInputs]:
        """Make the inputs of the encoder's and of the decoder's layers."""
        (s, t), keys = (batch.tokens.shape[1], batch.decoder.tokens.shape[1]), batch.places.sample_keys
        spread = self.placement.spread
        places = range(t) if batch.decoder.places.positions is None else batch.decoder.places.positions
        assert isinstance(places, range), "a decoder's positions must be contiguous"
        rows = Rows(range(s), keys=keys, spread=spread)
        encoder = PairInputs(rows, deferred=deferred, mask=batch.mask)
        own = None if keys is None else derive(site_key("decoder"), keys)
        rows = Rows(places, keys=own, spread=spread)
        decoder = replace(encoder, rows=rows, encoded_positions=range(s), store=store)
        encodes = range(s) if self.encoder and s else None
        decodes = places if self.decoder else None
        if self.biases is None or (encodes is None and decodes is None):
            return encoder, decoder
        within, earlier = self.biases(encodes, decodes)
        if within is not None and batch.mask is not None:
            # Once for all layers: otherwise each would combine mask and bias in a tensor [b, n/tp, s, s].
            encoder = replace(encoder, mask=None)
            within = within.masked_fill(~batch.mask, -torch.inf)
        return replace(encoder, bias=within), replace(decoder, bias=earlier)

    def _stack(self, layers: nn.ModuleList, units: list[Unit], x: Tensor, inputs: PairInputs) -> Tensor:
        return run_layers(list(layers), x, inputs, units, self.keeping)[0] if layers else x
