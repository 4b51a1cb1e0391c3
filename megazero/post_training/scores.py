"""Rows of texts whose scores are compared: the micro-batch, and the chunk with their losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.preference.rewards import RewardConfig
from megazero.config.tree.config import Config
from megazero.data.labelled.dataset import UNKNOWN_LABEL
from megazero.layers.inputs import Deferred
from megazero.loss import LossTerm
from megazero.models.batch import Columns, MicroBatch, SampleIndex, tensor_of
from megazero.models.classifier import SCORES, LastTokenClassifier
from megazero.models.classifier_batch import ClassifierCollate, LabelledBatch
from megazero.models.objective import LossChange, over_columns
from megazero.mpu.context import ParallelContext
from megazero.pipeline.chunk import Boundary, Chunk, ChunkResult

_PAIRS = "pairs"


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """A micro-batch of `n` pairs; row 2i is the chosen answer of pair i, row 2i + 1 the rejected one.

    Attributes:
        rows: the rows with labels [n]: 0, or -1 for a pair that does not count. Its `pooled` are places among
            this rank's columns.
        here: float32 [2n], 1 for rows whose last token is among this rank's columns, else 0.
        margins: float32 [n], by how much the chosen answer is better.
        shares: float32 [s/cp, n], the weight of each token in its pair's loss; None if last tokens count.
    """

    of_sequences = MicroBatch.of_sequences | {_PAIRS, "tokens"}

    rows: LabelledBatch
    here: Tensor
    margins: Tensor
    shares: Tensor | None = None

    @property
    def counts(self) -> dict[str, float]:
        """The numbers of pairs that count, of tokens and of sequences."""
        counts = self.rows.counts
        return {
            _PAIRS: float(self.rows.known),
            **{name: counts[name] for name in ("tokens", "sequences", "micro_batches")},
        }


@dataclass(frozen=True)
class PairCollate:
    """Turns the arrays of `PairSamples` into a `PairBatch`.

    Attributes:
        rows: makes batches of whole rows.
        columns: the columns of this rank.
        per_token: whether each token has a share of the loss.
    """

    rows: ClassifierCollate
    columns: Columns
    per_token: bool

    @classmethod
    def of(cls, config: Config, vocab_size: int, context: ParallelContext, seed: int | None) -> PairCollate:
        """Make the collate function of a configuration."""
        rows = ClassifierCollate.of(True, config, vocab_size, context, seed)
        per_token = config.reward.reward_loss == "per_token"
        return cls(rows, Columns.of(config.parallel, context), per_token)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> PairBatch:
        """Make a batch; a pair without answers does not count.

        Raises:
            DataError: a token lies outside the vocabulary.
        """
        tokens, lengths = arrays["tokens"], arrays["lengths"]
        labels = np.where(arrays["answers"][:, 0] < lengths[:, 0], 0, UNKNOWN_LABEL)
        blank = np.zeros_like(tokens)
        named = {"tokens": tokens, "token_types": blank, "lengths": lengths, "labels": labels}
        whole = self.rows(named, samples)
        width, device = whole.tokens.shape[1], self.rows.device
        place = self.columns.places(width)[lengths.reshape(-1) - 1]
        pooled = np.arange(len(place)) + len(place) * np.maximum(place, 0)
        shares = None
        if self.per_token:
            of_tokens = shares_of(tokens[..., :width], lengths) * (labels == 0)[:, None]
            shares = tensor_of(np.ascontiguousarray(self.columns.own(of_tokens).T), device)
        own = tensor_of(self.columns.own(np.arange(width)[None])[0], device)
        types = whole.places.token_types
        assert types is not None, "labelled rows have types"
        places = replace(whole.places, token_types=types[:, own])
        rows = replace(whole, tokens=whole.tokens[:, own], places=places, pooled=tensor_of(pooled, device))
        return PairBatch(
            rows.tokens,
            places=places,
            rows=rows,
            here=tensor_of((place >= 0).astype(np.float32), device),
            margins=tensor_of(arrays["margins"], device),
            shares=shares,
        )


def shares_of(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The weight of each token of pairs [n, 2, T]: float32 [n, T], which sums to 1 over those that count.

    They are those from the first that differs to the end of the longer row.
    """
    places = np.arange(tokens.shape[-1])
    known = np.where(places < lengths[..., None], tokens, -1)
    differs = known[:, 0] != known[:, 1]
    counted = differs.cumsum(-1).astype(bool) & (places < lengths.max(-1)[:, None])
    shares: np.ndarray = counted / np.maximum(1, counted.sum(-1, keepdims=True))
    return shares.astype(np.float32)


@dataclass(frozen=True)
class RewardLoss(LossChange):
    """Losses of pairs of scores; pairwise is Bradley's and Terry's (1952).

    Attributes:
        section: which loss.
    """

    section: RewardConfig

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss, its centering, and figures that are only reported."""
        center = self.section.center_rewards_coefficient
        centering = (LossTerm("center", center, _PAIRS),) if center else ()
        reported = ("accuracy", "reward_chosen", "reward_rejected")
        return (
            LossTerm("reward", 1.0, _PAIRS),
            *centering,
            *(LossTerm(name, 0.0, _PAIRS) for name in reported),
        )

    def on_chunk(self, student: nn.Module) -> RewardChunk:
        """Run a classifier's chunk, and compare the scores of its pairs."""
        assert isinstance(student, LastTokenClassifier), "rewards need the score of a last token"
        return RewardChunk(student, self)

    def of_pairs(self, pairs: Tensor, batch: PairBatch) -> dict[str, Tensor]:
        """The sums over pairs of each term that depends on the scores [n, 2] of last tokens."""
        chosen, rejected = pairs.unbind(-1)
        known = (batch.rows.labels != UNKNOWN_LABEL).float()
        sums = {
            "accuracy": chosen.detach() > rejected.detach(),
            "reward_chosen": chosen.detach(),
            "reward_rejected": rejected.detach(),
        }
        if batch.shares is None:
            sums["reward"] = -F.logsigmoid(chosen - rejected - batch.margins)
        if self.section.center_rewards_coefficient:
            sums["center"] = (chosen + rejected).square()
        return {name: (values * known).sum() for name, values in sums.items()}


@dataclass(frozen=True)
class RewardChunk(Chunk[PairBatch]):
    """A chunk of a classifier with one class that is trained on pairs; its output is `SCORES`, [n, 2].

    Attributes:
        student: the chunk that is trained.
        loss: replaces its cross-entropy.
    """

    student: LastTokenClassifier
    loss: RewardLoss

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The terms of pairs, then those of the routers."""
        own = self.student.own_terms
        return (*self.loss.terms, *(term for term in self.student.terms if term not in own))

    def input_boundary(self, batch: PairBatch) -> Boundary:
        """The boundary of the wrapped chunk."""
        return self.student.input_boundary(batch.rows)

    output_boundary = input_boundary

    def run(
        self, batch: PairBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or with the head the loss terms."""
        student = self.student
        hidden, sums = student.through(batch.rows, hidden, deferred=deferred)
        if student.head is None:
            return ChunkResult(hidden, sums.terms, sums.tallies)
        # Scores are not dropped out, as in TRL and DeepSpeed-Chat.
        rows = replace(batch.rows, places=replace(batch.rows.places, sample_keys=None))
        if batch.shares is not None:
            rows = replace(rows, pooled=torch.arange(batch.tokens.numel(), device=batch.tokens.device))
        scores: Tensor = student.head(hidden, rows, deferred).float().view(-1)
        last, terms = scores, dict(sums.terms)
        if batch.shares is not None:
            chosen, rejected = scores.view(len(batch.shares), -1, 2).unbind(-1)
            terms["reward"] = -(F.logsigmoid(chosen - rejected) * batch.shares).sum()
            last = scores.detach()[batch.rows.pooled]
        cp = student.placement.groups["cp"]
        pairs = over_columns((last * batch.here)[None], cp).view(-1, 2)
        compared = self.loss.of_pairs(pairs, batch)
        terms |= {name: value / cp.size for name, value in compared.items()}
        return ChunkResult(None, terms, sums.tallies, {SCORES: pairs.detach()})
