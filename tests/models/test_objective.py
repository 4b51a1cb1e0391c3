"""A chunk with an objective, against the same model's own loss; sums over columns that ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from megazero.loss import LossTerm
from megazero.models.objective import LOGS, AnswerBatch, Objective, ObjectiveChunk, over_columns
from megazero.mpu.solo_group import SoloGroup
from tests.layouts.layout import Layout
from tests.models.test_distilled import batch, build


@dataclass(frozen=True)
class Likelihood(Objective):
    """The negative log-likelihood of answers, at a temperature, and half the square of a row's."""

    temperature: float = 1.0
    terms = (LossTerm("answers", over="lm"), LossTerm("squares", over="rows"))

    def changed(self, logits, batch, first):
        return logits / self.temperature

    def __call__(self, logs, batch, cp):
        own = batch.learnt.weighted(logs)
        rows = over_columns(own, cp)
        return {"answers": -own.sum(), "squares": 0.5 * rows.square().sum() / cp.size}


def answers(given) -> AnswerBatch:
    return AnswerBatch(
        given.tokens, given.targets, places=given.places, divisors={"rows": float(len(given.tokens))}
    )


def test_the_likelihood_of_answers_is_the_model_s_own_loss():
    gpt, given = build(Layout(), 1), answers(batch())
    result = ObjectiveChunk.of(gpt, Likelihood()).run(given)
    own = gpt.run(given).terms["lm"]
    assert result.terms["answers"].item() == own.item()
    rows = (given.learnt.weighted(result.outputs[LOGS])).sum(0)
    assert result.terms["squares"].item() == pytest.approx(0.5 * rows.square().sum().item())
    weights = list(gpt.parameters())
    ours = torch.autograd.grad(result.terms["answers"], weights)
    theirs = torch.autograd.grad(own, weights)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_changed_logits_are_those_that_count():
    gpt, given = build(Layout(), 1), answers(batch(seed=None))
    logs = ObjectiveChunk.of(gpt, Likelihood(2.0)).run(given).outputs[LOGS]
    scaled = (gpt(given)[..., : gpt.vocab_size].float() / 2.0).log_softmax(-1)
    wanted = scaled.gather(-1, given.learnt.labels.t().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logs, wanted, rtol=1e-5, atol=1e-6)


def test_counts_are_shared_by_context_parallel_ranks():
    given = answers(batch())
    assert given.counts["rows"] == 2.0
    assert given.counts_of_share(2)["rows"] == 1.0
    assert given.counts_of_share(2)["lm"] == given.learnt.count  # of this rank's columns


def test_the_terms_of_routers_stay():
    gpt = build(Layout(), 1)
    assert [term.name for term in ObjectiveChunk.of(gpt, Likelihood()).terms] == ["answers", "squares"]
    assert over_columns(torch.ones(3, 2), SoloGroup("cp", 0)).tolist() == [3.0, 3.0]
    assert replace(answers(batch()), divisors={}).counts == batch().counts
