"""GPT: embedding, transformer layers, head. GPT-2 and Llama are settings of it.

The model is a list of blocks, each with hidden states in and hidden states out. A pipeline may cut the list
anywhere: a `GPT` holds one contiguous span of it, which is the whole list if there is only one stage.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.config.tree import ModelConfig, RecomputeConfig
from megazero.layers import (
    MLP,
    Deferred,
    Embedding,
    InputKeeping,
    KeyValueStore,
    LayerInputs,
    Norm,
    Placement,
    SelfAttention,
    TransformerLayer,
    column_linear,
    recompute_units,
    run_layers,
    vocabulary_spec,
)
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.chunk import Block, ChunkSpan
from megazero.models.flops import attention_flops, logits_flops, mlp_flops
from megazero.mpu import spec_of
from megazero.ops.cross_entropy import vocab_parallel_cross_entropy
from megazero.ops.positions import Positions, position_tensor
from megazero.ops.rotary import rotary_table


class Head(nn.Module):
    """Final norm and projection to the vocabulary: [s, b, h] -> logits [s, b, v/tp].

    `tied` is the embedding's weight; with None, the head has its own weight.
    """

    def __init__(
        self, config: ModelConfig, vocab: tuple[int, int], placement: Placement, tied: nn.Parameter | None
    ):
        super().__init__()
        self.placement = placement
        self.norm = Norm(
            "final_norm", config.hidden_size, config.normalization, config.norm_epsilon, placement
        )
        if tied is None:
            spec = vocabulary_spec("head.weight", *vocab, config)
            if not config.untie_embeddings_and_output_weights:
                spec = replace(spec, tied_with="embedding.word.weight", shared=True)
            tied = placement.parameter(spec)
        self.weight = tied

    def forward(self, x: Tensor, deferred: Deferred | None = None) -> Tensor:
        x = self.norm(x).to(self.placement.dtype)
        placement = self.placement
        return column_linear(x, self.weight, None, placement.tp, placement.sequence_parallel, deferred)


def gpt_blocks(config: ModelConfig, padded_vocab: int) -> tuple[Block, ...]:
    """The blocks that a GPT of this shape consists of: embedding, layers, head."""
    layer = attention_flops(config, causal=True) + mlp_flops(config)
    layers = (Block(TransformerLayer.__name__, layer),) * config.num_layers
    head = Block(Head.__name__, logits_flops(config, padded_vocab))
    return (Block(Embedding.__name__, 0.0), *layers, head)


class GPT(nn.Module):
    """A decoder-only transformer language model (Radford et al. 2019; Touvron et al. 2023), or a part of it.

    Args:
        config: shape of the whole model.
        vocab: number of vocabulary entries (without padding, with padding).
        placement: ranks, dtype and device.
        recompute: what backward recomputes.
        span: the blocks held here; None holds all of them.
        tied: the embedding's weight for a tied head, if another chunk on this rank holds it.
    """

    terms = (LossTerm("lm"),)

    def __init__(
        self,
        config: ModelConfig,
        vocab: tuple[int, int],
        placement: Placement,
        recompute: RecomputeConfig | None = None,
        span: ChunkSpan | None = None,
        tied: nn.Parameter | None = None,
    ):
        super().__init__()
        recompute = recompute or RecomputeConfig()
        self.span = span = span or ChunkSpan(range(config.num_layers))
        self.config = config
        self.placement = placement
        self.recompute = recompute
        self.keeping = InputKeeping.of(recompute, placement)
        self.vocab_size = vocab[0]
        self.embedding = Embedding(config, *vocab, placement) if span.embedding else None
        if self.embedding is not None and span.shared:
            self.embedding.word.spec = replace(spec_of(self.embedding.word), shared=True)
        self.layers = nn.ModuleList(self._layer(i) for i in span.layers)
        self.head = None
        if span.head:
            if tied is None and self.embedding is not None and not config.untie_embeddings_and_output_weights:
                tied = self.embedding.word
            self.head = Head(config, vocab, placement, tied)
        self.units = recompute_units(len(span.layers), recompute)

    def _layer(self, i: int) -> TransformerLayer:
        """Layer `i`: causal attention and an MLP."""
        selective = self.recompute.granularity == "selective"
        attention = SelfAttention(i, self.config, self.placement, causal=True, recompute=selective)
        return TransformerLayer(
            i, self.config, self.placement, attention, MLP(i, self.config, self.placement)
        )

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The embedding's weight, which a tied head shares; None if this chunk has no embedding."""
        return None if self.embedding is None else self.embedding.word

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""
        return torch.float32 if self.config.fp32_residual_connection else self.placement.dtype

    def hidden_shape(self, batch: Batch) -> tuple[int, int, int]:
        """The shape of hidden states between chunks: [s, b, h], or [s/tp, b, h] if sequence-parallel."""
        b, s = batch.tokens.shape
        rows = s // self.placement.tp.size if self.placement.sequence_parallel else s
        return rows, b, self.config.hidden_size

    def blocks(self) -> list[nn.Module]:
        """The blocks that this chunk runs, in order: embedding, layers, head."""
        return [block for block in (self.embedding, *self.layers, self.head) if block is not None]

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> Tensor:
        """Logits of the next token, [s, b, v/tp], from the hidden states of the previous chunk."""
        return self.head(self.hidden(batch, hidden, deferred=deferred), deferred)

    def hidden(
        self,
        batch: Batch,
        hidden: Tensor | None = None,
        *,
        cache: KeyValueStore | None = None,
        deferred: Deferred | None = None,
    ) -> Tensor:
        """Hidden states after this chunk's layers, [s, b, h] ([s/tp, b, h] under sequence parallelism).

        Args:
            batch: the micro-batch.
            hidden: hidden states of the previous chunk; None if this one has the embedding.
            cache: keys and values of earlier positions.
            deferred: collects the computation of weight gradients, which backward then leaves out.
        """
        positions = range(batch.tokens.shape[1]) if batch.positions is None else batch.positions
        embedded = batch.position_ids
        if embedded is None:
            embedded = position_tensor(positions, batch.tokens.device)
        inputs = LayerInputs(
            _rows_first(positions),
            self._rotary(embedded),
            batch.document_ids,
            batch.sample_keys,
            cache,
            deferred,
        )
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, embedded, inputs)
        return run_layers(self.layers, hidden, inputs, self.units, self.keeping)

    def run(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What this chunk passes on and adds to the loss terms, as `pipeline.executor.Chunk` specifies.

        The one with the head adds the sum of the masked cross-entropies in nats to ``lm``, a float32 scalar.
        """
        if self.head is None:
            return self.hidden(batch, hidden, deferred=deferred), {}
        losses = self.token_losses(self(batch, hidden, deferred=deferred), batch.labels)
        if batch.loss_mask is not None:
            losses = losses * batch.loss_mask.t()
        return None, {"lm": losses.sum()}

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each position, float32 [s, b], from logits [s, b, v/tp] and labels [b, s]."""
        start = self.placement.tp.rank * logits.shape[-1]
        return vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), self.placement.tp, vocab_start=start, vocab_size=self.vocab_size
        )

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        dim = int(self.config.head_dim * self.config.rotary_percent)
        return rotary_table(_rows_first(positions), dim, self.config.rotary_base)

    def without_sequence_parallelism(self) -> GPT:
        """The same weights, in the same memory, in a model that holds all positions on every rank.

        The slices of the weights do not depend on sequence parallelism.
        """
        if not self.placement.sequence_parallel:
            return self
        vocabulary = self.tied_weight
        if vocabulary is None and self.head is not None:
            vocabulary = self.head.weight
        padded_size = self.vocab_size if vocabulary is None else vocabulary.shape[0] * self.placement.tp.size
        on_meta = replace(self.placement, sequence_parallel=False, device=torch.device("meta"))
        twin = GPT(self.config, (self.vocab_size, padded_size), on_meta, span=self.span)
        twin.load_state_dict(self.state_dict(), assign=True)
        return twin


def _rows_first(positions: Positions) -> Positions:
    """[b, s] -> [s, b]; [s] and ranges stay as they are."""
    return positions if isinstance(positions, range) or positions.dim() == 1 else positions.t()
