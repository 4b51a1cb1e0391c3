"""Classifiers: a pretrained trunk and a linear layer over the classes, on the hidden states of one token."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.account.flops import dense_flops, layer_flops
from megazero.config.tree.config import Config
from megazero.data.labelled.dataset import UNKNOWN_LABEL
from megazero.layers.inputs import Deferred
from megazero.layers.linear import ReplicatedLinear
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.loss import LossTerm
from megazero.models.chunk import HEAD, Block, Tie
from megazero.models.classifier_batch import LabelledBatch
from megazero.models.trunk import Trunk, trunk_blocks
from megazero.mpu.rng import site_key
from megazero.ops.counter_random import derive
from megazero.ops.dropout import Dropout, dropout_mask_hidden
from megazero.pipeline.chunk import ChunkResult
from megazero.spec.model import HeadSpec, ModelSpec
from megazero.spec.resolve import model_spec

OWN = ("pooler.", "classifier.")
"""Prefixes of the names of parameters that a pretrained model need not have."""
PRETRAINING_ONLY = ("head.", "binary_head.", "pooler.")
"""Prefixes of the names of a pretrained model's parameters that a classifier does not use."""

SCORES = "scores"
"""The name of a classifier's output."""


class ClassifierHead(nn.Module):
    """Final norm of the pooled rows, optional pooler (dense and tanh), dropout, scores.

    Every sequence-parallel rank computes all of the rows, so no parameter in here has partial gradients.
    """

    def __init__(self, spec: HeadSpec, placement: Placement, *, pooler: bool):
        super().__init__()
        assert spec.classes is not None, "a classifier has classes"
        self.spread = placement.spread
        self.placement = whole = placement.without_sequence_parallelism()
        size, std, self.dropout = spec.stream.width, spec.stream.std, spec.stream.dropout
        self.norm = Norm("final_norm", spec.norm, whole)
        self.pooler = ReplicatedLinear("pooler", size, size, whole, std) if pooler else None
        self.classifier = ReplicatedLinear("classifier", size, spec.classes, whole, std)
        if not spec.classifier_bias:
            self.classifier.bias = None

    def forward(self, x: Tensor, batch: LabelledBatch, deferred: Deferred | None = None) -> Tensor:
        """Hidden states [s, b, h] ([s/tp, b, h] under sequence parallelism) -> scores [b, classes]."""
        x = self.spread.all_columns(x)
        chosen = self.norm(x.flatten(0, 1)[batch.pooled]).to(self.placement.dtype)
        if self.pooler is not None:
            chosen = torch.tanh(self.pooler(chosen, deferred))
        scores: Tensor = self.classifier(self._dropped(chosen, batch.places.sample_keys), deferred)
        return scores

    def _dropped(self, rows: Tensor, keys: Tensor | None) -> Tensor:
        if keys is None or self.dropout == 0.0:
            return rows
        drop = Dropout(self.dropout, derive(site_key("hidden", "classifier"), keys), range(1))
        return rows * dropout_mask_hidden(drop, 1, *rows.shape)[0] / (1.0 - drop.p)


class Classifier(Trunk[LabelledBatch]):
    """A transformer that classifies sequences, or answers multiple-choice questions.

    With one class a sample has one row per choice, and the row with the highest score wins (Radford et al.
    2018). Otherwise a sample is one row with a score for each class (Devlin et al. 2019). The loss (term
    ``task``) is the cross-entropy over samples with a label.
    """

    causal: ClassVar[bool]
    pooler: ClassVar[bool]
    own_terms = (LossTerm("task"), LossTerm("accuracy", 0.0))
    head: ClassifierHead | None

    @classmethod
    def ties(cls, spec: ModelSpec) -> tuple[Tie, ...]:
        """No tied weights: the head does not use the vocabulary."""
        return ()

    def build_head(self, tied: nn.Parameter | None) -> ClassifierHead:
        """Build the pooler and the classifier."""
        return ClassifierHead(self.spec.head, self.placement, pooler=self.pooler)

    @classmethod
    def blocks_of(cls, config: Config, padded_vocab: int) -> tuple[Block, ...]:
        """The blocks of such a classifier; the head computes one token of each row."""
        spec = model_spec(config.model)
        hidden, length, classes = spec.stream.width, spec.length, spec.head.classes
        assert classes is not None, "a classifier has classes"
        layers = (layer_flops(layer, length) for layer in spec.layers)
        head = 2 * hidden * classes + (dense_flops(hidden) if cls.pooler else 0.0)
        return trunk_blocks(spec, layers, Block(HEAD, ClassifierHead.__name__, head / length))

    def forward(
        self, batch: LabelledBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> Tensor:
        """Compute scores, float32 [n, classes or choices], from the hidden states of the previous chunk."""
        return self._scores(self.through(batch, hidden, deferred=deferred)[0], batch, deferred)

    def run(
        self, batch: LabelledBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or with the head the loss terms (see `Chunk.run`).

        ``task`` is the sum of cross-entropies in nats, ``accuracy`` the number of correct answers; both are
        float32 scalars. The output is the scores, float32 [n, classes or choices].
        """
        hidden, sums = self.through(batch, hidden, deferred=deferred)
        if self.head is None:
            return ChunkResult(hidden, sums.terms, sums.tallies)
        scores = self._scores(hidden, batch, deferred)
        answers = scores.detach()
        loss = F.cross_entropy(scores, batch.labels, ignore_index=UNKNOWN_LABEL, reduction="sum")
        right = (answers.argmax(-1) == batch.labels).sum().float()
        terms = {**sums.terms, "task": loss, "accuracy": right}
        return ChunkResult(None, terms, sums.tallies, {SCORES: answers})

    def _scores(self, hidden: Tensor, batch: LabelledBatch, deferred: Deferred | None) -> Tensor:
        assert self.head is not None, "only a chunk with the head has scores"
        scores: Tensor = self.head(hidden, batch, deferred)
        return scores.float().view(len(batch.labels), -1)


class FirstTokenClassifier(Classifier):
    """A classifier on a bidirectional trunk, with a pooler on the first token (Devlin et al. 2019)."""

    causal = False
    pooler = True


class LastTokenClassifier(Classifier):
    """A classifier on a causal trunk, on the last token, which sees all others (Radford et al. 2018)."""

    causal = True
    pooler = False
