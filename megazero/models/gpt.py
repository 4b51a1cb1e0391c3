"""GPT: embedding, transformer layers, head. GPT-2 and Llama are settings of it.

The model is a list of blocks, each with hidden states in and hidden states out. A pipeline may cut the list
anywhere: a `GPT` holds one contiguous span of it, which is the whole list if there is only one stage.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.collectives import gather_for_parts, share_for_parts
from megazero.layers.embedding import output_weight
from megazero.layers.inputs import Deferred
from megazero.layers.linear import column_linear
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.chunk import HEAD, Block
from megazero.models.flops import layer_flops, logits_flops
from megazero.models.language_model import LanguageModel
from megazero.models.trunk import trunk_blocks
from megazero.ops.cross_entropy import vocab_parallel_cross_entropy
from megazero.ops.linear_cross_entropy import linear_cross_entropy
from megazero.pipeline.chunk import ChunkResult


class Head(nn.Module):
    """Final norm and projection to the vocabulary: [s, b, h] -> logits [s, b, v/tp].

    `tied` is the embedding's weight, if it is on this rank; `tiles` those of the loss.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab: tuple[int, int],
        placement: Placement,
        tied: nn.Parameter | None,
        *,
        tiles: int = 0,
    ):
        super().__init__()
        self.tiles = tiles
        self.placement, self.vocab_size = placement, vocab[0]
        self.norm = Norm(
            "final_norm", config.hidden_size, config.normalization, config.norm_epsilon, placement
        )
        self.weight = output_weight(config, vocab, placement) if tied is None else tied

    def forward(self, x: Tensor, deferred: Deferred | None = None, labels: Tensor | None = None) -> Tensor:
        """The logits; or, with labels [b, s], each position's cross-entropy, float32 [s, b], without them."""
        x = self.norm(x).to(self.placement.dtype)
        tp, sequence_parallel = self.placement.tp, self.placement.sequence_parallel
        if labels is None:
            return column_linear(x, self.weight, None, tp, sequence_parallel, deferred)
        # The weight's gradient is never deferred: that would keep the logits' gradient until then.
        # The loss makes a gradient of its own, for this sum alone.
        whole = gather_for_parts(x, tp) if sequence_parallel else share_for_parts(x, tp, given_away=True)
        matrix = self.weight.flatten(0, -2)
        start = tp.rank * matrix.shape[0]
        target, tiles = labels.t().contiguous(), self.tiles
        return linear_cross_entropy(whole, matrix, target, tp, start, self.vocab_size, tiles=tiles)


def gpt_blocks(config: Config, padded_vocab: int) -> tuple[Block, ...]:
    """The blocks that a GPT of this shape consists of: embedding, layers, head."""
    model = config.model
    layers = (layer_flops(model, number, causal=True) for number in range(model.num_layers))
    return trunk_blocks(model, layers, Block(HEAD, Head.__name__, logits_flops(model, padded_vocab)))


class GPT(LanguageModel):
    """A decoder-only transformer language model, or a part of it.

    (Radford et al. 2019; Touvron et al. 2023.)
    """

    causal = True
    own_terms = (LossTerm("lm"),)
    head: Head | None

    def build_head(self, tied: nn.Parameter | None) -> Head:
        """The norm and the projection."""
        tiles = self.recompute.logits_tiles
        return Head(self.config, self.held.vocab, self.placement, tied, tiles=tiles)

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> Tensor:
        """Logits of the next token, [s, b, v/tp], from the hidden states of the previous chunk."""
        return self._logits(self.through(batch, hidden, deferred=deferred)[0], deferred)

    def run(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """The hidden states for the next chunk, and the sums for the loss terms (see `pipeline.chunk.Chunk`).

        The one with the head adds the sum of the masked cross-entropies in nats to ``lm``, a float32 scalar.
        """
        hidden, sums = self.through(batch, hidden, deferred=deferred)
        if self.head is None:
            return ChunkResult(hidden, sums.terms, sums.tallies)
        if self.recompute.logits:
            losses = {"lm": batch.total(self.head(hidden, labels=batch.labels))}
        else:
            losses = self.losses(self.head(hidden, deferred), batch, overwrite=True)
        return ChunkResult(None, {**sums.terms, **losses}, sums.tallies)

    def losses(self, logits: Tensor, batch: Batch, *, overwrite: bool = False) -> dict[str, Tensor]:
        """The sums that the head adds to the loss terms, from its logits [s, b, v/tp].

        overwrite: whether backward may write over the logits, which nothing else may then read.
        """
        assert batch.labels is not None, "a batch to learn from has labels"
        return {"lm": batch.total(self.token_losses(logits, batch.labels, overwrite=overwrite))}

    def token_losses(self, logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> Tensor:
        """Cross-entropy of each position, float32 [s, b], from logits [s, b, v/tp] and labels [b, s]."""
        return vocab_parallel_cross_entropy(
            logits,
            labels.t().contiguous(),
            self.placement.tp,
            vocab_start=self.placement.tp.rank * logits.shape[-1],
            vocab_size=self.vocab_size,
            overwrite=overwrite,
        )

    def position_losses(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """The loss of each position in nats, 0 where it does not count, float32 [s, b]."""
        assert batch.labels is not None, "a batch to measure has labels"
        losses = self.token_losses(self._logits(self.hidden(batch, hidden)), batch.labels)
        return losses if batch.loss_mask is None else losses * batch.loss_mask.t()

    def _logits(self, hidden: Tensor, deferred: Deferred | None = None) -> Tensor:
        assert self.head is not None, "only a chunk with the head has logits"
        logits: Tensor = self.head(hidden, deferred)
        return logits

    def without_sequence_parallelism(self) -> GPT:
        """The same weights, in the same memory, in a model that holds all positions on every rank.

        The slices of the weights do not depend on sequence parallelism.
        """
        if not self.placement.sequence_parallel:
            return self
        on_meta = replace(self.placement.without_sequence_parallelism(), device=torch.device("meta"))
        twin = GPT(replace(self.held, placement=on_meta, recompute=RecomputeConfig(), tied={}))
        twin.load_state_dict(self.state_dict(), assign=True)
        for mine, its in zip(self.routers(), twin.routers(), strict=True):
            its.bias, its.load = mine.bias, mine.load
        return twin
