"""GPT: embedding, transformer layers, head. GPT-2 and Llama shapes are settings of it.

The model is a list of blocks, each hidden states in, hidden states out. A pipeline cuts the list anywhere: a
`GPT` holds one contiguous `Part` of it, which is everything where there is one stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megazero.config.tree import ModelConfig, RecomputeConfig
from megazero.layers import (
    Deferred,
    Embedding,
    InputKeeping,
    KeyValueStore,
    LayerInputs,
    Norm,
    Placement,
    TransformerLayer,
    column_linear,
    recompute_units,
    run_layers,
    vocabulary_spec,
)
from megazero.mpu import SampleStreams, new_parameter, spec_of
from megazero.ops.cross_entropy import vocab_parallel_cross_entropy
from megazero.ops.rotary import rotary_table


@dataclass(frozen=True)
class Batch:
    """One micro-batch of `b` sequences of `s` tokens.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s], the token after each; None when generating.
        loss_mask: float32 [b, s], weight of each position in the loss; None counts all.
        position_ids: int64 [b, s] or [s]; None counts from 0.
        document_ids: int32 [b, s]; None lets all earlier positions be attended to.
        streams: random streams of the samples; None turns dropout off.
    """

    tokens: Tensor
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    streams: SampleStreams | None = None

    @classmethod
    def from_arrays(cls, arrays: Mapping, device: torch.device, streams: SampleStreams | None) -> Batch:
        """From a dataset's stacked arrays (keys as the attributes; others are ignored)."""
        names = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")
        tensors = {n: torch.from_numpy(arrays[n]).to(device) for n in names if n in arrays}
        return cls(**tensors, streams=streams)


class Head(nn.Module):
    """Final norm and projection to the vocabulary: [s, b, h] -> logits [s, b, v/tp].

    `tied` is the embedding's weight, or None for a weight of its own.
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
            tied = new_parameter(spec, placement.tp.size, placement.dtype, placement.device)
        self.weight = tied

    def forward(self, x: Tensor, deferred: Deferred | None = None) -> Tensor:
        x = self.norm(x).to(self.placement.dtype)
        placement = self.placement
        return column_linear(x, self.weight, None, placement.tp, placement.sequence_parallel, deferred)


@dataclass(frozen=True)
class Part:
    """Which blocks of the model one pipeline chunk holds.

    Attributes:
        layers: the transformer layers.
        embedding: whether it begins with the embedding.
        head: whether it ends with the head.
        shared: whether the embedding is tied to a head on another stage.
    """

    layers: range
    embedding: bool = True
    head: bool = True
    shared: bool = False


class GPT(nn.Module):
    """A decoder-only transformer language model (Radford et al. 2019; Touvron et al. 2023), or a part of it.

    Args:
        config: shape.
        vocab: (entries, entries after padding) of the vocabulary.
        placement: ranks, dtype and device.
        recompute: what backward computes again.
        part: the blocks held here; None holds all.
        tied: the embedding's weight for a tied head, where another part of this rank holds it.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab: tuple[int, int],
        placement: Placement,
        recompute: RecomputeConfig | None = None,
        part: Part | None = None,
        tied: nn.Parameter | None = None,
    ):
        super().__init__()
        recompute = recompute or RecomputeConfig()
        self.part = part = part or Part(range(config.num_layers))
        self.config = config
        self.placement = placement
        self.keeping = InputKeeping.of(recompute, placement)
        self.vocab_size = vocab[0]
        self.embedding = Embedding(config, *vocab, placement) if part.embedding else None
        if self.embedding is not None and part.shared:
            self.embedding.word.spec = replace(spec_of(self.embedding.word), shared=True)
        selective = recompute.granularity == "selective"
        self.layers = nn.ModuleList(
            TransformerLayer(i, config, placement, recompute_core=selective) for i in part.layers
        )
        self.head = None
        if part.head:
            if tied is None and self.embedding is not None and not config.untie_embeddings_and_output_weights:
                tied = self.embedding.word
            self.head = Head(config, vocab, placement, tied)
        self.units = recompute_units(len(part.layers), recompute)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of the hidden states between parts."""
        return torch.float32 if self.config.fp32_residual_connection else self.placement.dtype

    def hidden_shape(self, batch: Batch) -> tuple[int, int, int]:
        """Of the hidden states between parts: [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        b, s = batch.tokens.shape
        rows = s // self.placement.tp.size if self.placement.sequence_parallel else s
        return rows, b, self.config.hidden_size

    def blocks(self) -> list[nn.Module]:
        """What this part runs, in order: embedding, layers, head."""
        return [block for block in (self.embedding, *self.layers, self.head) if block is not None]

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> Tensor:
        """Logits of the next token, [s, b, v/tp], from the hidden states of the part before."""
        return self.head(self.hidden(batch, hidden, deferred=deferred), deferred)

    def hidden(
        self,
        batch: Batch,
        hidden: Tensor | None = None,
        *,
        cache: KeyValueStore | None = None,
        deferred: Deferred | None = None,
    ) -> Tensor:
        """Hidden states after this part's layers, [s, b, h] ([s/tp, b, h] under sequence parallelism).

        Args:
            batch: the micro-batch.
            hidden: hidden states of the part before; None where this part has the embedding.
            cache: keys and values of earlier positions.
            deferred: collects the computation of weight gradients instead of backward doing it.
        """
        positions = batch.position_ids
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        inputs = LayerInputs(self._rotary(positions), batch.document_ids, batch.streams, cache, deferred)
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, positions, inputs)
        return run_layers(self.layers, hidden, inputs, self.units, self.keeping)

    def loss(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sum of the masked cross-entropies in nats, and the sum of the mask; both float32 scalars."""
        logits = self(batch, hidden, deferred=deferred)
        losses = self.token_losses(logits, batch.labels)
        if batch.loss_mask is None:
            return losses.sum(), torch.tensor(float(losses.numel()), device=losses.device)
        mask = batch.loss_mask.t()
        return (losses * mask).sum(), mask.sum()

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
        positions = positions.t() if positions.dim() == 2 else positions
        return rotary_table(positions, dim, self.config.rotary_base)
