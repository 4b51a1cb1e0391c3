"""BERT: embedding with token types, bidirectional layers, and the two heads of pretraining.

The layers are GPT's. With `apply_residual_connection_post_layernorm` the residual is taken after the norm, as
in the original. A pipeline may cut the list of blocks anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.account.flops import dense_flops, layer_flops, logits_flops
from megazero.config.tree.config import Config
from megazero.layers.embedding import logit_bias, output_weight
from megazero.layers.inputs import Deferred
from megazero.layers.linear import ReplicatedLinear, column_linear
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.loss import PADDING, LossTerm
from megazero.models.bert_batch import BertBatch
from megazero.models.chunk import HEAD, Block
from megazero.models.language_model import MaskedLanguageModel
from megazero.models.trunk import trunk_blocks
from megazero.models.word_losses import word_sums, word_terms
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.cross_entropy import VocabularySlice, vocab_parallel_cross_entropy, vocab_parallel_losses
from megazero.pipeline.chunk import ChunkResult
from megazero.spec.model import HeadSpec
from megazero.spec.resolve import model_spec


class BertHead(nn.Module):
    """Final norm, masked-LM head (dense, GELU, norm, logits with a bias) and optionally the binary head.

    It computes only the rows that have a loss: masked tokens, and the first token of each sample. Every
    sequence-parallel rank computes all of them, so no parameter in here has partial gradients.

    `tied` is the embedding's weight, if it is on this rank.
    """

    def __init__(
        self, spec: HeadSpec, vocab: tuple[int, int], placement: Placement, tied: nn.Parameter | None
    ):
        super().__init__()
        self.spread = placement.spread
        self.placement = whole = placement.without_sequence_parallelism()
        self.exact = spec.exact_gelu
        size, std = spec.stream.width, spec.stream.std
        self.norm = Norm("final_norm", spec.norm, whole)
        self.dense = ReplicatedLinear("head.dense", size, size, whole, std)
        self.dense_norm = Norm("head.norm", spec.norm, whole)
        self.weight = output_weight(spec, vocab, whole) if tied is None else tied
        self.bias = logit_bias(vocab, whole)
        self.pooler = ReplicatedLinear("pooler", size, size, whole, std) if spec.binary else None
        self.binary = ReplicatedLinear("binary_head", size, 2, whole, std) if spec.binary else None

    def forward(
        self, x: Tensor, batch: BertBatch, deferred: Deferred | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the masked tokens, [m, 1, v/tp], and of the order of each sample's segments, [n, 2].

        x: [s, b, h] ([s/tp, b, h] under sequence parallelism), or only its wanted rows [r, b, h].
        """
        x = self.spread.all_columns(x)
        read = batch.targets
        rows = read.masked if self.binary is None else torch.cat([read.masked, read.firsts])
        if x.shape[0] < batch.tokens.shape[1]:
            rows = batch.places_among_wanted(rows)
        chosen = self.norm(x.flatten(0, 1)[rows]).to(self.placement.dtype)
        masked, firsts = chosen.tensor_split([len(read.masked)])
        masked = bias_gelu(self.dense(masked.unsqueeze(1), deferred), None, exact=self.exact)
        masked = self.dense_norm(masked).to(self.placement.dtype)
        logits = column_linear(masked, self.weight, self.bias, self.placement.tp, False, deferred)
        if self.binary is None or self.pooler is None:
            return logits, None
        return logits, self.binary(torch.tanh(self.pooler(firsts, deferred)), deferred)


def bert_blocks(config: Config, padded_vocab: int) -> tuple[Block, ...]:
    """The blocks of a BERT of this shape: embedding, layers, head.

    Only masked tokens reach the head, and the last layer computes no others beyond their queries, unless
    sequence parallelism gives a rank its share of all rows, or routers have to see them.
    """
    spec = model_spec(config.model)
    hidden, length, (*first, last) = spec.stream.width, spec.length, spec.layers
    every = config.parallel.sequence_parallel or bool(spec.expert_layers)
    wanted = 1.0 if every else config.data.mask_prob
    layers = [*(layer_flops(layer, length) for layer in first), layer_flops(last, length, queried=wanted)]
    head = config.data.mask_prob * (dense_flops(hidden) + logits_flops(hidden, padded_vocab))
    return trunk_blocks(spec, layers, Block(HEAD, BertHead.__name__, head))


class BERT(MaskedLanguageModel):
    """A bidirectional transformer (Devlin et al. 2019; Shoeybi et al. 2019), or a part of it.

    It learns to predict masked tokens (term ``lm``) and, with the binary head, whether two segments are in
    order (term ``sop``; Lan et al. 2020).
    """

    head: BertHead | None

    def build_head(self, tied: nn.Parameter | None) -> BertHead:
        """Build the masked-LM head and the binary head."""
        return BertHead(self.spec.head, self.held.vocab, self.placement, tied)

    @property
    def own_terms(self) -> tuple[LossTerm, ...]:
        """The loss terms, and as reported figures their accuracies and the fraction of padding."""
        order = ("sop",) if self.spec.head.binary else ()
        reported = ("lm_accuracy", *(f"{name}_accuracy" for name in order), PADDING)
        trained = (*word_terms(self.spec.head), *(LossTerm(name) for name in order))
        return (*trained, *(LossTerm(name, 0.0) for name in reported))

    def forward(
        self, batch: BertBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `BertHead`'s logits from the hidden states of the previous chunk."""
        hidden, _ = self.through(batch, hidden, deferred=deferred, wanted=batch.targets.wanted)
        return self._logits(hidden, batch, deferred)

    def run(
        self, batch: BertBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or with the head the loss terms (see `Chunk.run`).

        ``lm`` and ``sop`` are sums of cross-entropies in nats, their accuracies are numbers of correct
        answers, ``padding`` is the number of empty positions; all are float32 scalars.
        """
        wanted = None if self.head is None else batch.targets.wanted
        hidden, sums = self.through(batch, hidden, deferred=deferred, wanted=wanted)
        if self.head is None:
            return ChunkResult(hidden, sums.terms, sums.tallies)
        logits, order = self._logits(hidden, batch, deferred)
        labels, part = batch.targets.labels.unsqueeze(1), self.slice_of(logits)
        padding = torch.full((), float(batch.padding), device=logits.device)
        terms = {
            **sums.terms,
            **word_sums(self.spec.head, vocab_parallel_losses(logits, labels, part, overwrite=True)),
            "lm_accuracy": vocab_parallel_hits(logits.detach(), labels, part),
            PADDING: padding,
        }
        if order is not None:
            terms["sop"] = F.cross_entropy(order.float(), batch.targets.is_random, reduction="sum")
            terms["sop_accuracy"] = (order.detach().argmax(-1) == batch.targets.is_random).sum().float()
        return ChunkResult(None, terms, sums.tallies)

    def sample_losses(self, batch: BertBatch, hidden: Tensor | None = None) -> Tensor:
        """The summed masked-LM loss of each sample, in nats, float32 [b]; samples must not share rows.

        Called on the chunk with the head, with the hidden states of the previous chunk.
        """
        logits: Tensor = self(batch, hidden)[0]
        losses = vocab_parallel_cross_entropy(
            logits, batch.targets.labels.unsqueeze(1), self.slice_of(logits)
        )
        samples = len(batch.tokens)
        return losses.new_zeros(samples).index_add(0, batch.targets.masked % samples, losses.flatten())

    def _logits(
        self, hidden: Tensor, batch: BertBatch, deferred: Deferred | None
    ) -> tuple[Tensor, Tensor | None]:
        assert self.head is not None, "only a chunk with the head has logits"
        logits: tuple[Tensor, Tensor | None] = self.head(hidden, batch, deferred)
        return logits


def vocab_parallel_argmax(logits: Tensor, part: VocabularySlice) -> Tensor:
    """The id with the highest logit over all ranks, int64 [...], from logits [..., v/tp].

    Of equal logits the lowest id wins, on every layout. Columns beyond the vocabulary are padding.
    """
    if columns := part.held(logits.shape[-1]):
        value, best = logits[..., :columns].max(-1)
    else:
        value = logits.new_full(logits.shape[:-1], -torch.inf)
        best = torch.zeros_like(value, dtype=torch.int64)
    best = best + part.start
    if part.group.size == 1:
        return best
    highest = value.to(torch.float64, copy=True)
    part.group.all_reduce(highest, op="max")
    lowest = torch.where(value == highest, -best.double(), -torch.inf)
    part.group.all_reduce(lowest, op="max")
    return -lowest.long()


def vocab_parallel_hits(logits: Tensor, target: Tensor, part: VocabularySlice) -> Tensor:
    """How many targets, int64 [...], have the highest logit: a float32 scalar, equal on all ranks."""
    return (vocab_parallel_argmax(logits, part) == target).sum().float()
