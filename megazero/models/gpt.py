"""GPT: embedding, transformer layers, head. GPT-2 and Llama shapes are settings of it.

The model is a list of blocks, each hidden states in, hidden states out, so that a pipeline can cut it
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.config.tree import ModelConfig, RecomputeConfig
from megazero.layers import (
    Embedding,
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
from megazero.mpu import SampleStreams, new_parameter
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
            tied = new_parameter(spec, placement.tp.size, placement.dtype, placement.device)
        self.weight = tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).to(self.placement.dtype)
        return column_linear(x, self.weight, None, self.placement.tp, self.placement.sequence_parallel)


class GPT(nn.Module):
    """A decoder-only transformer language model (Radford et al. 2019; Touvron et al. 2023).

    Args:
        config: shape.
        vocab: (entries, entries after padding) of the vocabulary.
        placement: ranks, dtype and device.
        recompute: what backward computes again.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab: tuple[int, int],
        placement: Placement,
        recompute: RecomputeConfig | None = None,
    ):
        super().__init__()
        recompute = recompute or RecomputeConfig()
        self.config = config
        self.placement = placement
        self.vocab_size = vocab[0]
        self.embedding = Embedding(config, *vocab, placement)
        selective = recompute.granularity == "selective"
        self.layers = nn.ModuleList(
            TransformerLayer(i, config, placement, recompute_core=selective) for i in range(config.num_layers)
        )
        tied = None if config.untie_embeddings_and_output_weights else self.embedding.word
        self.head = Head(config, vocab, placement, tied)
        self.units = recompute_units(config.num_layers, recompute)

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the next token, [s, b, v/tp]."""
        return self.head(self.hidden(batch))

    def hidden(self, batch: Batch, cache: KeyValueStore | None = None) -> Tensor:
        """Hidden states before the head, [s, b, h] ([s/tp, b, h] under sequence parallelism)."""
        positions = batch.position_ids
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        inputs = LayerInputs(self._rotary(positions), batch.document_ids, batch.streams, cache)
        x = self.embedding(batch.tokens, positions, inputs)
        return run_layers(self.layers, x, inputs, self.units)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the masked cross-entropies in nats, and the sum of the mask; both float32 scalars."""
        logits = self(batch)
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
