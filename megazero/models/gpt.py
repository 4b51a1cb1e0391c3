"""GPT: embedding, transformer layers, head. GPT-2, Llama and many others are settings of it.

The model is a list of blocks from hidden states to hidden states. A pipeline may cut the list anywhere: a
`GPT` holds a contiguous part of it, or without a pipeline the whole list.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.account.flops import dense_flops, layer_flops, logits_flops
from megazero.config.tree.config import Config
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.collectives import gather_for_parts, share_for_parts
from megazero.layers.embedding import logit_bias, output_weight
from megazero.layers.inputs import Deferred
from megazero.layers.linear import LinearProduct, column_linear
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.chunk import HEAD, WORD, WORD_TIE, Block, Slice, Tie
from megazero.models.language_model import LanguageModel
from megazero.models.multi_token.block import further_terms, further_tokens, term_of
from megazero.models.trunk import routers_of, trunk_blocks
from megazero.models.word_losses import word_sums, word_terms
from megazero.moe.router import Router
from megazero.ops.cross_entropy import TokenLosses, VocabularySlice
from megazero.ops.linear_cross_entropy import linear_cross_entropy
from megazero.pipeline.chunk import ChunkResult
from megazero.spec.model import HeadSpec, ModelSpec
from megazero.spec.resolve import model_spec

HeadResult = Tensor | TokenLosses
"""Logits [s, b, v/tp], or the losses of tokens [s, b]."""


class Head(nn.Module):
    """Final norm and projection to the vocabulary: [s, b, h] -> logits [s, b, v/tp].

    `tied` is the embedding's weight, if it is on this rank; `tiles` the number of tiles of the loss.
    """

    def __init__(
        self,
        spec: HeadSpec,
        vocab: tuple[int, int],
        placement: Placement,
        tied: nn.Parameter | None,
        *,
        tiles: int = 0,
    ):
        super().__init__()
        self.tiles = tiles
        self.placement, self.vocab_size = placement, vocab[0]
        self.factor, self.bound = spec.factor, spec.softcap
        self.norm = Norm("final_norm", spec.norm, placement)
        self.weight = output_weight(spec, vocab, placement) if tied is None else tied
        self.bias = logit_bias(vocab, placement) if spec.bias else None
        self.product: LinearProduct = column_linear

    def forward(
        self,
        x: Tensor,
        deferred: Deferred | None = None,
        labels: Tensor | None = None,
        *,
        normed: bool = False,
        both: bool = False,
    ) -> HeadResult | tuple[HeadResult, Tensor]:
        """Compute logits; with labels [b, s], instead each position's losses, float32 [s, b].

        Args:
            x: hidden states [s, b, h].
            deferred: as in `column_linear`.
            labels: [b, s], the next tokens.
            normed: whether x is already normed.
            both: whether to return the normed x as a second result, for multi-token prediction.
        """
        x = x if normed else self.norm(x).to(self.placement.dtype)
        result = self._of_normed(x, deferred, labels)
        return (result, x) if both else result

    def _of_normed(self, x: Tensor, deferred: Deferred | None, labels: Tensor | None) -> HeadResult:
        x = x if self.factor == 1.0 else x * self.factor
        tp, sequence_parallel = self.placement.tp, self.placement.sequence_parallel
        if labels is None:
            logits = self.product(x, self.weight, self.bias, tp, sequence_parallel, deferred)
            return logits if self.bound is None else torch.tanh(logits / self.bound) * self.bound
        # The weight's gradient is not deferred, which would keep the logits' gradient in memory. The loss
        # returns a fresh gradient for `whole`, so it may be given away.
        whole = gather_for_parts(x, tp) if sequence_parallel else share_for_parts(x, tp, given_away=True)
        matrix = self.weight.flatten(0, -2)
        part = VocabularySlice(tp, tp.rank * matrix.shape[0], self.vocab_size)
        return linear_cross_entropy(whole, matrix, labels.t().contiguous(), part, tiles=self.tiles)


def gpt_blocks(config: Config, padded_vocab: int) -> tuple[Block, ...]:
    """The blocks of a GPT of this shape: embedding, layers, head."""
    spec = model_spec(config.model)
    hidden, length = spec.stream.width, spec.length
    layers = (layer_flops(layer, length) for layer in spec.layers)
    logits = logits_flops(hidden, padded_vocab)
    # A further token has a layer of its own, after a [2h, h] map that joins embeddings and hidden states.
    further = sum(layer_flops(layer, length) + 2 * dense_flops(hidden) + logits for layer in spec.further)
    return trunk_blocks(spec, layers, Block(HEAD, Head.__name__, logits + further))


class GPT(LanguageModel):
    """A decoder-only transformer language model, or a part of it.

    (Radford et al. 2019; Touvron et al. 2023.)
    """

    head: Head | None

    def __init__(self, held: Slice):
        super().__init__(held)
        self.further: nn.ModuleList | tuple[()] = ()
        if self.head is not None and held.spec.further:
            word = held.tied.get(WORD) if self.embedding is None else self.embedding.word
            if held.spec.head.tied:
                word = self.head.weight
            self.further = further_tokens(held, word)

    @classmethod
    def ties(cls, spec: ModelSpec) -> tuple[Tie, ...]:
        """The embedding's weight, if the head or multi-token prediction uses it."""
        return super().ties(spec) or (WORD_TIE,) * bool(spec.further)

    @property
    def own_terms(self) -> tuple[LossTerm, ...]:
        """The losses of the next token, then those of further tokens."""
        return (*word_terms(self.spec.head), *further_terms(self.spec))

    def build_head(self, tied: nn.Parameter | None) -> Head:
        """Build the norm and the projection."""
        head, tiles = self.spec.head, self.recompute.logits_tiles
        return Head(head, self.held.vocab, self.placement, tied if head.tied else None, tiles=tiles)

    def blocks(self) -> list[nn.Module]:
        """The blocks of this chunk, in order; those of multi-token prediction follow the head."""
        return [*super().blocks(), *self.further]

    def routers(self) -> list[Router]:
        """The routers of the chunk's layers, in order."""
        return [*super().routers(), *routers_of(nn.ModuleList(self.further))]

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> Tensor:
        """Compute logits of the next token, [s, b, v/tp], from the hidden states of the previous chunk."""
        return self._logits(self.through(batch, hidden, deferred=deferred)[0], deferred)

    def run(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or with the head the loss terms (see `Chunk.run`).

        The terms are sums of weighted losses, float32 scalars; ``lm`` is the cross-entropy in nats.
        """
        hidden, sums = self.through(batch, hidden, deferred=deferred)
        if self.head is None:
            return ChunkResult(hidden, sums.terms, sums.tallies)
        losses, hidden = self._read(hidden, batch.learnt.labels, deferred, more=len(self.further))
        terms = word_sums(self.spec.head, losses, batch.learnt.weighted)
        if self.further:
            inputs, _ = self.inputs_of(batch, deferred=deferred)
        for depth, (block, ahead) in enumerate(zip(self.further, batch.ahead, strict=True), 1):
            hidden, more = block(hidden, ahead.tokens, inputs)
            more_follow = len(self.further) - depth
            losses, hidden = self._read(hidden, ahead.targets.labels, deferred, more=more_follow, normed=True)
            terms[term_of(depth)] = ahead.targets.weighted(losses.loss).sum()
            sums = sums.plus(more)
        return ChunkResult(None, {**sums.terms, **terms}, sums.tallies)

    def _read(
        self,
        hidden: Tensor,
        labels: Tensor,
        deferred: Deferred | None,
        *,
        more: int,
        normed: bool = False,
    ) -> tuple[TokenLosses, Tensor]:
        """Compute the losses of each position, float32 [s, b], and the hidden states after the norm.

        The latter only if `more` further tokens read them: a second result of the head without a reader would
        gather the head's weights once more in backward.
        """
        assert self.head is not None, "only a chunk with the head has losses"
        given = None if self.recompute.logits else deferred
        ours = labels if self.recompute.logits else None
        result = self.head(hidden, given, ours, normed=normed, both=more > 0)
        read, hidden = result if more > 0 else (result, hidden)
        if self.recompute.logits:
            return read, hidden
        return self.token_losses(read, labels, overwrite=True), hidden

    def losses(self, logits: Tensor, batch: Batch, *, overwrite: bool = False) -> dict[str, Tensor]:
        """Compute the loss terms of the head from its logits [s, b, v/tp].

        overwrite: whether backward may overwrite the logits; nothing else may then read them.
        """
        losses = self.token_losses(logits, batch.learnt.labels, overwrite=overwrite)
        return word_sums(self.spec.head, losses, batch.learnt.weighted)

    def position_losses(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Compute the weighted loss of each position in nats, float32 [s, b]."""
        losses = self.token_losses(self._logits(self.hidden(batch, hidden)), batch.learnt.labels)
        return batch.learnt.weighted(losses.loss)

    def _logits(self, hidden: Tensor, deferred: Deferred | None = None) -> Tensor:
        assert self.head is not None, "only a chunk with the head has logits"
        logits: Tensor = self.head(hidden, deferred)
        return logits

    def without_sequence_parallelism(self) -> GPT:
        """Return a model that shares these weights and has all positions on every rank.

        It can share them because weights are sliced alike with and without sequence parallelism.
        """
        placement = self.placement.with_whole_sequences()
        if placement is self.placement:
            return self
        on_meta = replace(placement, device=torch.device("meta"))
        twin = GPT(replace(self.held, placement=on_meta, recompute=RecomputeConfig(), tied={}))
        twin.placement = placement  # with the real device, which a stage without weights has nowhere else
        twin.load_state_dict(self.state_dict(), assign=True)
        for mine, its in zip(self.routers(), twin.routers(), strict=True):
            its.bias, its.load = mine.bias, mine.load
        return twin
